"""Starting workers on a machine with GPUs, of which its driver alone tells here."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest
import torch
from tests.accelerator import sim
from tests.launch.conftest import PROGRAMS
from tests.loaders import loader_of
from tests.warm import processes

import unisono
from unisono.runtime.launch.call import generator_states, start_generators
from unisono.runtime.launch.placement import Machine

TWO = Machine(3, ("GPU-aa", "GPU-bb"))
VARIABLES = ("CUDA_VISIBLE_DEVICES", "UNISONO_WORKERS_PER_GPU", "CUBLAS_WORKSPACE_CONFIG")


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(Machine, "here", lambda: TWO)


def seen() -> list[str | None]:
    return [os.environ.get(name) for name in ("LOCAL_RANK", *VARIABLES)]


@pytest.mark.slow
def test_launched_workers_are_told_of_their_gpus(
    two_gpus: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = [[str(rank), None, "2", ":4096:8"] for rank in range(3)]
    assert unisono.launch(seen, workers_per_gpu=2, workers=3) == told
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    assert unisono.launch(seen) == [["0", "1", "1", ":4096:8"]]


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"workers": 3}, ValueError, r"at most 2 workers here, 1 for each GPU"),
        ({"workers_per_gpu": 0}, ValueError, "`workers_per_gpu` must be at least 1, but is 0"),
        ({"workers_per_gpu": "2"}, TypeError, "`workers_per_gpu` must be a whole number"),
    ],
)
def test_what_cannot_be_launched_is_refused_before_anything_starts(
    two_gpus: None, options: dict[str, Any], error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        unisono.launch(seen, **options)


def run(*arguments: str, **environ: str) -> Any:
    """Run the command on the machine of `with_gpus.py`."""
    kept = {name: value for name, value in os.environ.items() if name not in VARIABLES}
    command = [sys.executable, str(PROGRAMS / "with_gpus.py"), "run", *arguments]
    return processes.run(command, env={**kept, **environ})


def places(done: Any) -> list[Any]:
    assert done.returncode == 0, done.stderr
    return sorted(map(json.loads, done.stdout.splitlines()))


@pytest.mark.slow
def test_the_command_starts_a_worker_for_each_gpu() -> None:
    program = str(PROGRAMS / "place.py")
    one_each = [[str(rank), "2", None, None, "1", ":4096:8"] for rank in range(2)]
    assert places(run(program)) == one_each
    shared = [[str(rank), "4", None, None, "2", ":16:8"] for rank in range(4)]
    assert places(run("--workers-per-gpu", "2", program, CUBLAS_WORKSPACE_CONFIG=":16:8")) == shared
    chosen = [["0", "1", "GPU-b", None, "1", ":4096:8"]]
    assert places(run(program, CUDA_VISIBLE_DEVICES="GPU-b")) == chosen


class Rows(torch.utils.data.Dataset[torch.Tensor]):
    """Samples that loader processes read."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([index, 2.0])


def train(device: str, build: Any = None, loader_workers: int = 0) -> tuple[str, str]:
    """Train on a device, here on one that stands for GPUs."""
    if build is not None:
        build()
    torch.manual_seed(0)
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trainer = unisono.Trainer(
        model, optimizer, lambda model, batch: model(batch).mean(), shards=4, device=device
    )
    loader = loader_of(Rows(), 8, num_workers=loader_workers)
    trainer.fit(loader, steps=2)
    trainer.fit(loader, steps=4)
    return trainer.run.device.name, trainer.digest()


@pytest.mark.slow
def test_workers_of_a_trainer_take_their_devices(two_gpus: None) -> None:
    if reason := sim.why_not():
        pytest.skip(reason)
    # On workers alone, of which the second `fit` forks loader processes after its use.
    on_sim = unisono.launch(train, "sim", sim.install, 1, workers=3, workers_per_gpu=2)
    assert [device for device, _ in on_sim] == ["sim:0", "sim:0", "sim:1"]
    assert {digest for _, digest in on_sim} == {train("cpu")[1]}


class Generators:
    """`torch.cuda` on a machine with GPUs, as far as generators go; nothing may begin CUDA."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, is_used: bool) -> None:
        self.calls: list[Any] = []
        state = torch.tensor([1, 2, 3], dtype=torch.uint8)
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda: is_used)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
        monkeypatch.setattr(torch.cuda, "get_rng_state", lambda: state)
        monkeypatch.setattr(torch.cuda, "set_rng_state_all", self.calls.extend)
        monkeypatch.setattr(torch.cuda, "manual_seed_all", self.calls.append)


@pytest.fixture
def generators_put_back() -> Any:
    from unisono.runtime.device import generators_put_back

    with generators_put_back():
        yield


@pytest.mark.parametrize(("is_used", "calls"), [(True, [[1, 2, 3]] * 2), (False, [7])])
def test_generators_of_gpus_go_on_from_the_callers(
    monkeypatch: pytest.MonkeyPatch, generators_put_back: None, is_used: bool, calls: list[Any]
) -> None:
    generators = Generators(monkeypatch, is_used=is_used)
    monkeypatch.setenv("UNISONO_WORKERS_PER_GPU", "1")
    torch.default_generator.manual_seed(7)
    states = generator_states()
    torch.default_generator.manual_seed(8)
    start_generators(states, 9)
    assert [call.tolist() if is_used else call for call in generators.calls] == calls


def test_of_a_script_all_start_alike(
    monkeypatch: pytest.MonkeyPatch, generators_put_back: None
) -> None:
    generators = Generators(monkeypatch, is_used=False)
    start_generators({}, 9)
    assert generators.calls == []  # no GPU is told of
    monkeypatch.setenv("UNISONO_WORKERS_PER_GPU", "1")
    start_generators({}, 9)
    assert generators.calls == [9]


USES = """
import sys, torch
used = []
for name in ("_lazy_init", "current_device", "get_device_properties", "synchronize"):
    setattr(torch.cuda, name, lambda *a, name=name, **k: used.append(name) or 0)
torch.cuda.is_available = lambda: True
torch.cuda.device_count = lambda: 2
from unisono.runtime.launch import forkserver
forkserver.load()
print(used, torch.cuda.is_initialized())
"""


@pytest.mark.slow
def test_the_fork_server_does_not_begin_to_use_a_gpu() -> None:
    """Its forks could not use one: where torch says there are some, what it loads touches none."""
    done = subprocess.run([sys.executable, "-c", USES], capture_output=True, text=True)
    assert done.stdout == "[] False\n", done.stderr
