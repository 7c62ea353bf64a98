"""Batches that are copied to a device before their step change no bit and have nobody wait."""

import functools

import pytest
from tests.accelerator import sim
from tests.data import augmenting
from tests.loaders import loader_of

import unisono
from unisono.data import loader
from unisono.data.loader_processes import LoaderProcesses

pytestmark = pytest.mark.slow


def count_early_batches():
    """Have each early batch wait for its process, so that none is missed; gives their places."""
    places, is_ready = [], LoaderProcesses.is_ready

    class Counted(loader.EarlyBatch):
        def __init__(self, place, *others):
            places.append(place)
            super().__init__(place, *others)

    LoaderProcesses.is_ready = lambda processes, within_s=0.0: is_ready(processes, 60.0)
    loader.EarlyBatch = Counted
    return places


def train(kind, loader_workers, device="sim", **options):
    if device == "sim":
        sim.install()
    places = count_early_batches()
    found = augmenting.train(augmenting.Noisy(kind), loader_workers, device=device, **options)
    return found, len(places)


@pytest.fixture
def untouched(monkeypatch):
    monkeypatch.setattr(loader, "EarlyBatch", loader.EarlyBatch)
    monkeypatch.setattr(LoaderProcesses, "is_ready", LoaderProcesses.is_ready)


@pytest.mark.parametrize("kind", ["torch", "python", "numpy"])
def test_bits_are_the_cpus(accelerator, kind):
    expected, num_early = train(kind, 2, "cpu")
    assert num_early == 0
    num_steps = augmenting.EPOCHS * 5
    # All steps but the first have one, and those of a validation are read as they come.
    assert train(kind, 2) == (expected, num_steps - 1)
    assert train(kind, 0) == (expected, 0)


def test_training_waits_for_no_batch(accelerator):
    trainer = augmenting.make(device="sim")
    places = count_early_batches()
    loader = loader_of(augmenting.Noisy(), 10, num_workers=2)
    with accelerator.synchronizations() as seen:
        trainer.fit(loader, steps=12)
    assert len(places) == 11
    assert [each for each in seen if "unisono/data" in each.file or "arrivals" in each.file] == []


def test_a_run_resumes_with_other_batches_early(accelerator, tmp_path):
    whole, _ = train("numpy", 0, totals={"steps": 12})
    for loader_workers, steps in ((2, 3), (0, 7), (1, 12)):
        options = {"totals": {"steps": steps}, "directory": tmp_path}
        result, _ = train("numpy", loader_workers, **options)
    assert result == whole


@pytest.mark.parametrize(
    "at", ["shard", *(pytest.param(one, marks=pytest.mark.long) for one in ("begin", "update"))]
)
def test_a_worker_that_is_killed_costs_nothing(monkeypatch, untouched, at):
    if reason := sim.why_not():
        pytest.skip(reason)
    alone, _ = train("torch", 0, "cpu")
    monkeypatch.setenv("UNISONO_FAULTS", f"kill:rank=1,step=7,at={at}")
    program = functools.partial(train, "torch", 2)
    results = unisono.launch(program, workers=3)
    assert [found for found, _ in results] == [alone] * 3
    # The replacement of rank 1 may join behind the last step.
    assert all(num_early > 0 for rank, (_, num_early) in enumerate(results) if rank != 1)
