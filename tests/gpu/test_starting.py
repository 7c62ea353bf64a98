"""Starting workers where there is a GPU: what they see, and what they begin with."""

from __future__ import annotations

import os

import pytest
import torch
from tests.loaders import loader_of
from torch.utils.data import Dataset

import unisono
from unisono.runtime.launch.placement import Machine, gpus_of_driver

pytestmark = pytest.mark.needs_cuda


def begun() -> tuple[bool, int, str | None, str | None, float]:
    was_begun = torch.cuda.is_initialized()
    here = torch.ones(1, device="cuda")
    return (
        was_begun,
        torch.cuda.device_count(),
        os.environ.get("UNISONO_WORKERS_PER_GPU"),
        os.environ.get("CUBLAS_WORKSPACE_CONFIG"),
        here.item(),
    )


def drawn() -> list[float]:
    return torch.rand(3, device="cuda").tolist()


class OnDevice(Dataset[torch.Tensor]):
    """Samples that lie on a GPU."""

    def __init__(self, device: str) -> None:
        self.samples = torch.zeros(8, 2, device=device)

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.samples[index]


def read(device: str) -> int:
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trainer = unisono.Trainer(model, optimizer, lambda model, x: model(x).mean(), shards=2)
    return trainer.fit(loader_of(OnDevice(device), 4, num_workers=1), steps=4).steps


def test_the_driver_knows_the_gpus_that_torch_knows(device: str) -> None:
    if "CUDA_VISIBLE_DEVICES" not in os.environ:
        assert len(gpus_of_driver()) == torch.cuda.device_count()
    uuid = f"GPU-{torch.cuda.get_device_properties(device).uuid}"
    assert uuid in [gpu.uuid for gpu in gpus_of_driver()]
    assert uuid in Machine.here().gpus


def test_a_process_that_has_used_a_gpu_launches_one_worker_for_each(device: str) -> None:
    torch.ones(1, device=device).item()
    count = torch.cuda.device_count()
    assert unisono.launch(begun) == [(False, count, "1", ":4096:8", 1.0)] * count


def test_workers_share_a_gpu_that_is_named(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    name = f"GPU-{torch.cuda.get_device_properties(0).uuid}"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", name)
    assert unisono.launch(begun, workers_per_gpu=2) == [(False, 1, "2", ":4096:8", 1.0)] * 2
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert unisono.launch(torch.cuda.is_available, workers=2) == [False] * 2


def test_what_is_drawn_on_a_gpu_goes_on_from_the_callers(device: str) -> None:
    torch.cuda.manual_seed(5)
    drawn()
    state = torch.cuda.get_rng_state()
    expected = drawn()
    torch.cuda.set_rng_state(state)
    assert unisono.launch(drawn, workers=2, workers_per_gpu=2) == [expected] * 2


def test_a_loader_process_reads_for_a_worker_on_a_gpu_but_not_from_it(device: str) -> None:
    assert unisono.launch(read, "cpu", workers=1) == [4]
    with pytest.raises(unisono.errors.LoadingError, match="A loader process cannot use a GPU"):
        unisono.launch(read, device, workers=1)
