"""Runs on devices tell of their memory; nobody waits for a device to look at it."""

import json

import pytest
import torch
from tests.accelerator import sim
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import unisono
from unisono.runtime.device import Device, host
from unisono.runtime.world import World
from unisono.tools.report.top import LiveView

GIB = 2**30


def fit(directory, *, device="sim", steps=6, **options):
    x = torch.randn(48, 6, generator=torch.Generator().manual_seed(2))
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(6, 64), torch.nn.ReLU(), torch.nn.Linear(64, 2))
    trainer = unisono.Trainer(
        model,
        torch.optim.AdamW(model.parameters(), lr=0.01),
        lambda model, batch: F.cross_entropy(model(batch[0]), batch[1]),
        shards=2,
        directory=directory,
        device=device,
    )
    trainer.fit(TensorDataset(x, (x[:, 0] > 0).long()), batch_size=8, steps=steps, **options)
    return trainer


def events(directory, kind):
    lines = map(json.loads, (directory / "events.jsonl").read_text().splitlines())
    return [line for line in lines if line["event"] == kind]


@pytest.mark.slow
def test_a_run_on_a_device_tells_of_its_memory(accelerator, tmp_path):
    accelerator.limit(0, GIB)
    fit(tmp_path)
    (start,), first = events(tmp_path, "start"), events(tmp_path, "step")[0]
    assert start["machine"]["device_bytes"] == GIB
    assert start["machine"]["device"] == "test accelerator"
    parameters = 4 * (6 * 64 + 64 + 64 * 2 + 2)
    assert first["allocated_bytes"][0] >= 4 * parameters  # a part, and AdamW's two
    view = LiveView(tmp_path).look()
    assert view.workers[0].device_bytes == first["allocated_bytes"][0]


def on_each_worker(directory):
    sim.install()
    keep = torch.empty(unisono.world().rank * 10**6 // 4, device=f"sim:{unisono.world().rank}")
    fit(directory)
    return keep.nbytes


@pytest.mark.slow
def test_every_worker_has_an_entry(tmp_path):
    if reason := sim.why_not():
        pytest.skip(reason)
    unisono.launch(on_each_worker, tmp_path, workers=2)
    for step in events(tmp_path, "step"):
        if "allocated_bytes" in step:
            small, large = step["allocated_bytes"]
            assert 0.9e6 < large - small < 1.1e6
    assert "allocated_bytes" in events(tmp_path, "step")[0]


def test_looking_does_not_wait(accelerator):
    device = Device.of("sim:1", World())
    torch.zeros(1000, device="sim:1")
    with accelerator.synchronizations() as seen:
        assert device.memory() == (0, 4000)
    assert seen == []


def test_the_cpu_has_no_memory_of_its_own():
    free, total = host().room()
    assert free is None
    assert total > 10**8


def test_the_room_of_a_device_is_told(accelerator):
    accelerator.limit(2, 10_000)
    device = Device.of("sim:2", World())
    kept = torch.zeros(1000, device="sim:2")
    assert device.room() == (10_000 - kept.nbytes, 10_000)
