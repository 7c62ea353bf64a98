"""Do all workers have the same dataset? Each reports what it can see of it in some milliseconds.

The indices of ``Subset`` are compared, and a few samples, chosen by the seed. They are read as the
loop will read them, seeded for (seed, epoch, index): by the worker itself or, if loader processes
read, in a separate one, so that files that a dataset opens late are not shared. A sample that
differs when it is read twice is not compared; nor is a stream, or a dataset that cannot be read,
which the loop will report.

The first sample is read as the loop reads its first (``second_reading.py``): a dataset may keep
what it draws here, and the loop would find it kept. Other errors are ignored, and generators are
not advanced.
"""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from torch.utils.data import Subset

from unisono.data.collating import Collator
from unisono.data.data_reading import is_stream
from unisono.data.fetch import Reader, leaf_of, lies_in_memory
from unisono.data.loader_processes import LoaderProcesses
from unisono.plan.seeds import seed_of
from unisono.programs.hashes import hashed
from unisono.runtime.device import generators_put_back, num_threads

REMEDY = (
    "give every worker the whole dataset, as Unisono divides it. Most likely it was split without "
    "a seed (write `numpy.random.default_rng(0)`, `torch.Generator().manual_seed(0)`) or sliced by "
    "rank, as DDP wants it (leave that out)"
)
_SAMPLES = 8
_ENOUGH_S = 3e-3
_FORK_AT_MOST_S = 0.5
_INDICES_AT_MOST = 4096
_SHOWN = 4


def fingerprint_of_data(
    dataset: Any, length: int, *, seed: int, stream: str, epoch: int, in_fork: bool
) -> dict[str, str]:
    """Return facts about a dataset, by name, that must not differ between workers that have them.

    `in_fork`: read samples in a loader process, as the loop will. Raises LoadingError if a sample
    differs when it is read twice.
    """
    if is_stream(dataset) or not length:
        return {}
    leaf = leaf_of(dataset)
    collator = Collator(seed, stream, None, leaf, length)
    numbers = [seed_of("fingerprint", seed, place) % length for place in range(_SAMPLES)]
    try:
        facts = dict(_subsets(dataset))
        places = [_place(dataset, number) for number in numbers]
        reader = Reader(leaf, None, collator)
    except Exception:
        return {}

    def look(_: object = None) -> dict[str, str]:
        return _samples(reader, epoch, numbers, places)

    collator.begin_epoch(epoch)
    # Loader processes check the first samples that they read.
    if in_fork and not lies_in_memory(leaf):
        return facts | _in_fork(look)
    with num_threads(1), generators_put_back(), collator.own.put_back():
        reader.check_repeatable(numbers[:2], places[:2], epoch, [0, 0])
        return facts | look()


def _place(dataset: Any, number: int) -> int:
    """Return the index of a sample in the dataset below every ``Subset``."""
    while type(dataset) is Subset:
        dataset, number = dataset.dataset, int(dataset.indices[number])
    return number


def _in_fork(look: Callable[[object], dict[str, str]]) -> dict[str, str]:
    """Call `look` in a loader process, unless another thread of this one might hold a lock."""
    if threading.active_count() == 1:
        with suppress(Exception):
            processes = LoaderProcesses(look, 1, iter([None]))
            try:
                return processes.take() if processes.is_ready(_FORK_AT_MOST_S) else {}
            finally:
                processes.close(grace_s=0.0)
    return {}


def _samples(
    reader: Reader, epoch: int, numbers: Sequence[int], places: Sequence[int]
) -> dict[str, str]:
    """Return hashes of samples that are equal when read twice, within a few ms; at least one."""
    facts: dict[str, str] = {}
    start_s = time.perf_counter()
    for number, place in zip(numbers, places, strict=True):
        readings = (reader.read([number], [place], epoch, [0]) for _ in range(2))
        try:
            once, again = (hashed(each if reader.takes_many else each[0]) for each in readings)
        except Exception:
            return {}
        if again != once:
            return {}
        facts[f"sample {number} of the dataset"] = f"fingerprint {once[:8]}"
        if time.perf_counter() - start_s > _ENOUGH_S:
            break
    return facts


def _subsets(dataset: Any) -> list[tuple[str, str]]:
    """Return a description of the indices of each ``Subset``, from the outside in."""
    described: list[tuple[str, str]] = []
    while type(dataset) is Subset:
        name, count = "the indices of `Subset`", len(dataset.indices)
        name += f" {len(described) + 1}" * bool(described)
        places = range(0, count, -(-count // _INDICES_AT_MOST) or 1)
        seen = [int(dataset.indices[place]) for place in places]
        digest = hashlib.blake2b(repr(seen).encode(), digest_size=4).hexdigest()
        first = ", ".join(str(int(index)) for index in dataset.indices[:_SHOWN])
        more = ", …" * (count > _SHOWN)
        described.append((name, f"{first}{more} ({count:,} of them, {digest})"))
        dataset = dataset.dataset
    return described
