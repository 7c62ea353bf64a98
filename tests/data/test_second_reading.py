"""What a data set keeps from one reading to the next is refused where it could reach the result."""

import collections
import functools
import mmap
import multiprocessing
import os
import queue
import random
import re
import time

import numpy as np
import pytest
import torch
from tests.promises import promise
from torch import nn
from torch.utils.data import DataLoader, Dataset, Subset

import unisono
from unisono.data import second_reading
from unisono.data.fetch import fetcher

CALLS = []
READ = queue.SimpleQueue()  # which is not looked into
NUMBER = 0


class Plain(Dataset):
    def __init__(self):
        self.inputs = torch.randn(24, 4, generator=torch.Generator().manual_seed(3))
        self.kept = {}

    def __len__(self):
        return 24

    def __getitem__(self, index):
        return self.inputs[index]


class Counting(Plain):
    """A curriculum by a counter."""

    calls = 0

    def __getitem__(self, index):
        self.calls += 1
        return self.inputs[index] / self.calls


class Globally(Plain):
    def __getitem__(self, index):
        CALLS.append(index)
        return self.inputs[index]


class InNumber(Plain):
    def __getitem__(self, index):
        global NUMBER
        NUMBER += 1
        return self.inputs[index]


class Visits(Plain):
    def __init__(self):
        super().__init__()
        self.visits = np.zeros(24)

    def __getitem__(self, index):
        self.visits[index] += 1
        return self.inputs[index]


class Transform:
    __slots__ = ("strength",)

    def __init__(self):
        self.strength = 1.0

    def __call__(self, inputs):
        self.strength *= 0.999
        return inputs * self.strength


class Transformed(Plain):
    def __init__(self):
        super().__init__()
        self.transforms = [Transform()]

    def __getitem__(self, index):
        return self.transforms[0](self.inputs[index])


class ManyAtOnce(Counting):
    def __getitems__(self, indices):
        return [self[index] for index in indices]


def counting_collate():
    count = 0

    def collate(samples):
        nonlocal count
        count += 1
        return torch.stack(samples)

    return collate


def growing(samples, seen=[]):  # noqa: B006
    seen.append(len(samples))
    return torch.stack(samples)


COUNTING = {
    "dataset.calls": Counting,
    "dataset.transforms[0].strength": Transformed,
    "dataset.dataset.calls": lambda: Subset(ManyAtOnce(), range(24)),
}


class Caching(Plain):
    """Keeps what it drew."""

    def __getitem__(self, index):
        if index not in self.kept:
            self.kept[index] = self.inputs[index] + torch.randn(4)
        return self.kept[index]


class CachingOwn(Plain):
    def __init__(self):
        super().__init__()
        self.rng = np.random.default_rng(0)

    @functools.lru_cache(maxsize=100)  # noqa: B019
    def noise(self, index):
        return float(self.rng.normal())

    def __getitem__(self, index):
        return self.inputs[index] + self.noise(index)


class Once(Plain):
    """Draws for all samples when the first one is read."""

    noise = None

    def __getitem__(self, index):
        if self.noise is None:
            self.noise = np.random.randn(24)
        return self.inputs[index] + float(self.noise[index])


class CachingAndDrawing(Plain):
    """Draws anew and keeps the first."""

    def __getitem__(self, index):
        return self.kept.setdefault(index, self.inputs[index] + torch.randn(4))


class CachingOptions(Plain):
    def __getitem__(self, index):
        self.kept.setdefault("strength", random.uniform(0.5, 1.5))
        return self.inputs[index] * self.kept["strength"] + torch.rand(())


class Before(Plain):
    """Mixes with the sample that was read before."""

    def __init__(self):
        super().__init__()
        self.before = {"sample": self.inputs[0], "index": 0}

    def __getitem__(self, index):
        mixed = self.inputs[index] + self.before["sample"]
        self.before["sample"] = mixed
        return mixed


class Unseeded(Plain):
    def __getitem__(self, index):
        return self.inputs[index] + float(np.random.default_rng().normal())


class Timed(Plain):
    def __getitem__(self, index):
        return self.inputs[index], time.perf_counter_ns()


def mixing():
    before = [torch.zeros(4)]

    def collate(samples):
        batch = torch.stack(samples) + before[0]
        before[0] = batch[0].clone()
        return batch

    return collate


KEEPING = "keeps something of earlier readings"
OTHERS = "but reading the same sample twice gave different values: draw from"


class Mixed(Plain):
    """Adds a little of what it read before, which is the same when a sample comes again."""

    last = None

    def __getitem__(self, index):
        sample, before = super().__getitem__(index), self.last
        self.last = sample
        return sample if before is None else sample + before / 8


OTHER = [
    (Mixed, "`dataset.last` changes each time the same sample is read"),
    (Caching, f"`dataset.kept` {KEEPING}"),
    (CachingAndDrawing, f"`dataset.kept` {KEEPING}"),
    (CachingOptions, f"`dataset.kept['strength']` {KEEPING}"),
    (CachingOwn, KEEPING),
    (Once, f"`dataset.noise` {KEEPING}"),
    (Before, "`dataset.before['sample']` changes each time"),
    (Unseeded, OTHERS),
    (Timed, OTHERS),
    (lambda: (Plain(), mixing()), "`collate_fn.before[0]` changes each time"),
]


REFUSED = [(make, f"`{name}` changes each time") for name, make in COUNTING.items()] + OTHER


def taken(made):
    return made if isinstance(made, tuple) else (made, None)


@promise("one-result.8")
@pytest.mark.parametrize(("make", "words"), REFUSED)
def test_what_would_depend_on_who_reads_is_refused(make, words):
    dataset, collate = taken(make())
    fetch = fetcher(dataset, collate_fn=collate)
    with pytest.raises(unisono.errors.LoadingError, match=re.escape(words)) as caught:
        fetch(torch.tensor([5, 3]))
    assert caught.value.indices == (5,)


class Cached(Plain):
    """Keeps what it has read, opens a file, and notes what it read last."""

    def __init__(self):
        super().__init__()
        self.file = self.last = self.rng = None
        self.sizes = collections.Counter()

    @functools.cache  # noqa: B019
    def row(self, index):
        return self.inputs[index].clone()

    def __getitem__(self, index):
        if self.file is None:
            self.file = os.getpid()
        self.last, self.is_warm = index, True
        self.sizes[index] = 4
        if index not in self.kept:
            self.kept[index] = self.row(index)
        return self.kept[index] + random.random() + torch.rand(())


class Derived(Plain):
    """Keeps what it draws from a generator that is made of the index."""

    def __getitem__(self, index):
        if index not in self.kept:
            self.kept[index] = float(np.random.default_rng(index).normal())
        return self.inputs[index] + self.kept[index] + unisono.progress().step


class Bounded(Plain):
    """Empties its cache when that is full, which may be between two readings."""

    def __getitem__(self, index):
        if len(self.kept) >= 1:
            self.kept.clear()
        else:
            self.kept[-1] = None
        return self.kept.setdefault(index, self.inputs[index] * 2)


class Describing(Plain):
    """Notes what it drew last, as libraries of augmentations do."""

    last = 0.0

    def __getitem__(self, index):
        self.last = random.random()
        self.kept["angle"], self.kept["is_flipped"] = np.random.rand(3), self.last < 0.5
        return self.inputs[index] + self.last


class Seeding(Plain):
    def __init__(self):
        super().__init__()
        self.rng = torch.Generator()

    def __getitem__(self, index):
        self.rng.manual_seed(index)
        return self.inputs[index] + torch.rand((), generator=self.rng)


def two(samples):
    first, second = samples
    return torch.stack([first, second])


@promise("one-result.7")
@pytest.mark.parametrize(
    "make",
    [
        *(Plain, Cached, Derived, Bounded, Describing, Seeding),
        *(Globally, InNumber, Visits, lambda: (Plain(), two)),
        *(lambda: (Plain(), counting_collate()), lambda: (Plain(), growing)),
    ],
)
def test_counts_caches_files_and_what_is_made_of_the_index_are_welcome(make):
    dataset, collate = taken(make())
    fetch = fetcher(dataset, collate_fn=collate)
    again, _ = taken(make())
    expected = fetcher(again, collate_fn=collate)(torch.tensor([5, 3]))
    assert fetch(torch.tensor([5, 3])).equal(expected)


class Late(Plain):
    """Drifts from the twelfth batch on."""

    batch = drift = 0

    def __getitem__(self, index):
        READ.put(index)
        self.drift += self.batch >= 12
        return self.inputs[index] + self.drift


@promise("one-result.15")
def test_later_on_a_sample_is_read_twice_now_and_then(monkeypatch):
    monkeypatch.setattr(second_reading, "_PART_OF_TIME", 1e9)
    late = Late()
    fetch = fetcher(late)
    with pytest.raises(unisono.errors.LoadingError, match=r"`dataset\.drift` changes"):
        for batch in range(20):
            late.batch = batch
            fetch(torch.tensor([batch, batch + 1]))
    assert batch == 12


def test_samples_are_read_twice_rarely_and_no_more_if_that_takes_long(monkeypatch):
    class Slow(Plain):
        def __getitem__(self, index):
            read.put(index)
            time.sleep(0.002)
            return self.inputs[index]

    read = queue.SimpleQueue()
    fetch = fetcher(Slow())
    for start in range(10):
        fetch(torch.tensor([start]))
    assert read.qsize() == 10 + 2 * 4  # in batches 1, 2, 4 and 8
    monkeypatch.setattr(second_reading, "_PART_OF_TIME", 1e9)
    monkeypatch.setattr(second_reading, "_LONG_S", 1e-3)
    read = queue.SimpleQueue()
    fetch = fetcher(Slow())
    for start in range(10):
        fetch(torch.tensor([start]))
    assert read.qsize() == 10 + 2 * 4


# In a run


def made(**options):
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return unisono.Trainer(model, optimizer, lambda model, batch: model(batch).mean(), **options)


class Levelled(Plain):
    """Has a level, which a callback sets."""

    level = 1.0

    def __getitem__(self, index):
        return self.inputs[index] * self.level


class Lowers(unisono.callbacks.Callback):
    def __init__(self, data, *, when):
        self.data, self.when = data, when

    def on_step_end(self, fit, step):
        if step.number % 3 == self.when:
            self.data.level = self.data.level / 2


@pytest.mark.slow
@pytest.mark.parametrize("when", [0, 2])
def test_a_data_set_that_changes_is_read_as_it_is_by_other_processes(when):
    digests = set()
    for processes in (0, 1):
        data = Levelled()
        trainer = made(callbacks=[Lowers(data, when=when)])
        trainer.fit(DataLoader(data, batch_size=8, num_workers=processes), epochs=3)
        digests.add(trainer.digest())
    assert len(digests) == 1


class WrittenMeanwhile(Plain):
    """Has levels in shared memory, which another process raises during each reading."""

    def __init__(self, done):
        super().__init__()
        self.number, self.done = multiprocessing.Value("d", 0.0), done
        self.tensor, self.array = torch.zeros(2).share_memory_(), mmap.mmap(-1, 8)

    def __getitem__(self, index):
        os.write(self.done, b".")
        self.number.value += 1.0
        self.tensor += 1.0
        self.array[0] += 1
        return self.inputs[index]


def test_a_loader_process_leaves_alone_what_others_write_to_shared_memory():
    there, done = os.pipe()
    data = WrittenMeanwhile(done)
    fetch = fetcher(data)
    process = multiprocessing.get_context("fork").Process(
        target=fetch, args=(torch.tensor([5, 3]),)
    )
    process.start()
    process.join(60)
    os.close(done)
    num_readings = len(os.read(there, 1000))
    os.close(there)
    assert process.exitcode == 0
    assert num_readings > 3  # each with memory of its own would be put back
    assert (data.number.value, data.array[0]) == (num_readings, num_readings)
    assert data.tensor.tolist() == [num_readings] * 2
