"""What can be seen of a data set in some milliseconds, without a trace."""

import os
import queue
import random
import threading
import time
from unittest import mock

import numpy
import pytest
import torch
from torch.utils.data import Dataset, IterableDataset, Subset, TensorDataset

from unisono.data import fingerprint as module
from unisono.data.fetch import fetcher
from unisono.data.fingerprint import fingerprint_of_data
from unisono.errors import LoadingError
from unisono.programs.hashes import hashed


class Made(Dataset):
    """Calls `make` with each index, and notes where."""

    def __init__(self, make, length=50):
        self.make, self.length = make, length
        self.read_in = queue.SimpleQueue()  # which is not looked into

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        self.read_in.put(os.getpid())
        return self.make(index)


class Many(Made):
    def __getitems__(self, indices):
        return [self.make(index) for index in indices]


@pytest.fixture(autouse=True)
def time_is_plenty(monkeypatch):
    for name in ("_ENOUGH_S", "_FORK_AT_MOST_S"):
        monkeypatch.setattr(module, name, 30.0)


def seen(dataset, *, seed=0, epoch=0, in_fork=False):
    how = {"seed": seed, "stream": "train", "epoch": epoch, "in_fork": in_fork}
    return fingerprint_of_data(dataset, len(dataset), **how)


def tensors(num_samples=50, offset=0.0):
    return TensorDataset(torch.arange(num_samples * 4.0).view(-1, 4) + offset)


def processes_of(dataset):
    return [dataset.read_in.get() for _ in range(dataset.read_in.qsize())]


def samples_of(facts):
    return {name: value for name, value in facts.items() if name.startswith("sample ")}


@pytest.mark.parametrize("kind", [Made, Many])
@pytest.mark.parametrize("in_fork", [False, True])
def test_honest_augmentation_is_the_same_in_every_process(kind, in_fork):
    def augmented(index):
        return torch.randn(3) + index, numpy.random.rand(), random.random()

    first = seen(kind(augmented), in_fork=in_fork)
    torch.randn(7), numpy.random.rand(7), random.random()
    assert first == seen(kind(augmented), in_fork=in_fork)
    assert len(samples_of(first)) > 5


def test_samples_are_those_that_the_loop_reads():
    def augmented(index):
        return torch.randn(3) + index

    class Quiet(Made):
        def __getitem__(self, index):
            return self.make(index)

    facts = seen(Subset(Quiet(augmented), range(10, 30)), epoch=2, seed=5)
    (name, value), *_ = samples_of(facts).items()
    number = int(name.split()[1])
    fetch = fetcher(Subset(Quiet(augmented), range(10, 30)), seed=5)
    (sample,) = fetch(torch.tensor([number]), 2)
    assert value == f"fingerprint {hashed(sample)[:8]}"


@pytest.mark.parametrize(
    "other",
    [
        tensors(offset=1.0),
        TensorDataset(tensors().tensors[0].flip(0)),
        TensorDataset(tensors().tensors[0].double()),
        [(row,) for row in tensors(offset=1.0).tensors[0]],
        Made(lambda index: index + 1),
    ],
)
def test_another_data_set_has_another_fingerprint(other):
    same = tensors() if not isinstance(other, Made) else Made(lambda index: index)
    mine, theirs = samples_of(seen(same)), samples_of(seen(other))
    both = mine.keys() & theirs.keys()
    assert both
    assert any(mine[name] != theirs[name] for name in both)


def test_indices_of_each_subset_are_told():
    inner = Subset(tensors(), list(range(1, 41)))
    facts = seen(Subset(inner, numpy.arange(0, 20, 2)))
    assert facts["the indices of `Subset`"].startswith("0, 2, 4, 6, … (10 of them, ")
    assert facts["the indices of `Subset` 2"].startswith("1, 2, 3, 4, … (40 of them, ")
    for kind in (list, tuple, torch.tensor, numpy.array):
        indices = kind(list(range(0, 20, 2)))
        assert seen(Subset(inner, indices)) == facts
    assert seen(Subset(tensors(), [5]))["the indices of `Subset`"].startswith("5 (1 of them")


class Stream(IterableDataset):
    def __len__(self):
        return 9

    def __iter__(self):
        raise AssertionError("a stream must not be touched")


def raises(index):
    raise OSError("not there")


@pytest.mark.parametrize("in_fork", [False, True])
@pytest.mark.parametrize(
    "dataset",
    [
        Stream(),
        [],
        Made(raises),
        Subset(tensors(), [99] * 10),
        Subset(Made(lambda index: index), "no numbers"),
    ],
)
def test_what_cannot_be_compared_is_left_to_the_loop(dataset, in_fork):
    assert samples_of(seen(dataset, in_fork=in_fork)) == {}


@pytest.mark.parametrize(
    "dataset",
    [
        Made(lambda index: torch.rand(2, generator=torch.Generator().manual_seed(time.time_ns()))),
        Made(lambda index: numpy.random.default_rng().random()),
        Subset(Made(lambda index, kept={}: kept.setdefault(0, random.random())), range(3)),
    ],
)
def test_what_is_not_the_same_twice_is_refused_as_by_the_loop(dataset):
    with pytest.raises(LoadingError, match="a sample must depend on its index and the random"):
        seen(dataset)


def test_generators_are_as_they_were():
    def draws(index):
        return torch.rand(2), numpy.random.rand(), random.random()

    before = torch.get_rng_state(), numpy.random.get_state()[1].tolist(), random.getstate()
    seen(Made(draws))
    after = torch.get_rng_state(), numpy.random.get_state()[1].tolist(), random.getstate()
    assert torch.equal(before[0], after[0])
    assert before[1:] == after[1:]


def test_where_loader_processes_read_this_process_does_not():
    dataset = Made(lambda index: index)
    assert samples_of(seen(dataset, in_fork=True))
    assert processes_of(dataset) == []
    seen(dataset)
    assert set(processes_of(dataset)) == {os.getpid()}


@pytest.mark.parametrize("make", [lambda index: os._exit(3), lambda index: time.sleep(60)])
def test_a_fork_that_ends_or_takes_long_says_nothing(monkeypatch, make):
    if "sleep" in make.__code__.co_names:
        monkeypatch.setattr(module, "_FORK_AT_MOST_S", 0.01)
    assert samples_of(seen(Made(make), in_fork=True)) == {}


def test_a_fork_that_cannot_be_had_is_done_without(monkeypatch):
    monkeypatch.setattr(os, "fork", mock.Mock(side_effect=BlockingIOError))
    assert samples_of(seen(Made(lambda index: index), in_fork=True)) == {}


def test_nothing_is_forked_beside_threads():
    done = threading.Event()
    thread = threading.Thread(target=done.wait)
    thread.start()
    try:
        assert samples_of(seen(Made(lambda index: index), in_fork=True)) == {}
        assert samples_of(seen(tensors(), in_fork=True))
    finally:
        done.set()
        thread.join()


def test_of_samples_that_take_long_to_read_one_is_compared(monkeypatch):
    monkeypatch.setattr(module, "_ENOUGH_S", 0.0)
    assert len(samples_of(seen(Made(lambda index: index)))) == 1


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (torch.zeros(2), torch.zeros(3)),
        (torch.zeros(2), torch.zeros(2, dtype=torch.int32)),
        (torch.zeros(2, dtype=torch.bfloat16), torch.ones(2, dtype=torch.bfloat16)),
        (numpy.zeros(2), numpy.ones(2)),
        ({"a": 1}, {"a": 2}),
        ([1, 2], [2, 1]),
        ("a", "b"),
        (1, True),
        (None, 0),
        ([torch.zeros(1), "x"], [torch.zeros(1), "y"]),
    ],
)
def test_hashes_tell_samples_apart(one, other):
    assert hashed(one) == hashed(one)
    assert hashed(one) != hashed(other)
