"""Is a sample a function of its index? One is read twice now and then, and compared in bits.

Whatever else it depends on (how often this process has read, what it has read before, the time)
depends on how many processes there are. Both readings begin with the same seeds, so these must be
the same after both:

* the sample, and the batch that `collate_fn` makes of it,
* how far the generators have come: a data set that keeps what it drew draws nothing again,
* the numbers that the program's own objects hold, the lengths of their lists, small tensors: what
  accumulates shows there before it shows in a sample.

A first reading may open files and fill caches. What it leaves behind is welcome, if the second one
leaves it so. It happens where samples are read, before the first batch and then as often as costs
0.3 % of the time, and never again where a sample takes long. Streams cannot be read twice.
"""

from __future__ import annotations

import itertools
import math
import time
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import numpy as np
import torch

from unisono.data.collating import Collator
from unisono.data.sample_hash import hashed
from unisono.device import drawn_so_far
from unisono.errors import LoadingError
from unisono.reach import Holder

_PART_OF_TIME = 0.003
_LONG_S = 0.1
_SMALL = 1 << 20  # bytes of a tensor or an array that is compared
_BYTES_AT_MOST = 4 << 20  # of all of them
_ARRAYS = (torch.Tensor, np.ndarray, np.generic)
_NUMBERS = {bool, int, float, complex, itertools.count}
_LENGTHS = {list, dict, set, str, bytearray, Counter, OrderedDict, defaultdict, deque}
_RULE = (
    "a sample must depend on its index and the random numbers that are seeded for it alone, as "
    "what was read before differs with the number of workers, but"
)


class SecondReading:
    """Looks at the samples of one process in one loop. Final.

    Args:
        collator: seeds for them.
    """

    def __init__(self, collator: Collator) -> None:
        self._collator = collator
        self._due_at_s = -math.inf

    def is_due(self) -> bool:
        """Tell whether it is time to look."""
        return time.perf_counter() >= self._due_at_s

    def look(self, read: Callable[[], Any], number: int, epoch: int) -> None:
        """Read a sample twice.

        Args:
            read: gives a list with that sample; seeds generators before.
            number: the sample's.

        Raises:
            LoadingError: it is not the same twice.
        """
        begun_at_s, is_first = time.perf_counter(), self._due_at_s == -math.inf
        self._due_at_s = math.inf
        try:
            once = self._reading(read, number, epoch)
            long_s = time.perf_counter() - begun_at_s
            # Some make their generators only when they are read for the first time.
            if is_first and self._collator.own.look():
                once = self._reading(read, number, epoch)
            again = self._reading(read, number, epoch)
        except Exception:  # the batch will raise it, too
            return
        _compare(once, again, number)
        if long_s < _LONG_S:
            now_s = time.perf_counter()
            self._due_at_s = now_s + (now_s - begun_at_s) / _PART_OF_TIME

    def _reading(
        self, read: Callable[[], Any], number: int, epoch: int
    ) -> tuple[str, str, dict[str, Any]]:
        """Read, and tell the sample, the generators and what the program's objects hold then."""
        own = self._collator.own
        self._collator.seed_for("sample", epoch, number)  # where it is read without any code
        sample = read()
        told, drawn = hashed(sample), hashed([drawn_so_far(), own.states()])
        if self._collator.is_programs:
            with suppress(LoadingError):  # some do not take one sample
                told += hashed(self._collator.collate([number], sample, epoch))
            drawn += hashed([drawn_so_far(), own.states()])
        return told, drawn, _held(own.holders)


def _held(holders: Sequence[Holder]) -> dict[str, Any]:
    """Tell what is plain of what some objects hold, by name."""
    held: dict[str, Any] = {}
    room = _BYTES_AT_MOST
    for holder in holders:
        for name, value in holder.read():
            kind = type(value)
            if kind in _NUMBERS:
                held[holder.path + name] = repr(value)
            elif kind in _LENGTHS:
                held[holder.path + name] = len(value)
            elif isinstance(value, _ARRAYS) and value.nbytes <= min(room, _SMALL):
                room -= value.nbytes
                held[holder.path + name] = hashed(value, _SMALL)
    return held


def _compare(
    once: tuple[str, str, dict[str, Any]], again: tuple[str, str, dict[str, Any]], number: int
) -> None:
    """Refuse, with a LoadingError, what is not the same twice."""
    changed = [name for name, value in once[2].items() if again[2].get(name, value) != value]
    if changed:
        raise LoadingError(
            f"{_RULE} `{changed[0]}` changes each time the same sample is read: leave that out, "
            f"and take what changes in the course of training from `unisono.progress()`, which "
            f"has step, epoch and shard.",
            indices=(number,),
        )
    if once[1] != again[1]:
        raise LoadingError(
            f"{_RULE} the data set draws random numbers when it reads a sample for the first time, "
            f"and not when it reads it again, as if it kept what it drew: draw outside of what is "
            f"kept, or from a generator that is made of the index, such as "
            f"`numpy.random.default_rng(index)`.",
            indices=(number,),
        )
    if once[0] != again[0]:
        raise LoadingError(
            f"{_RULE} the same sample has other values when it is read again: draw from torch's, "
            f"numpy's or Python's default generator, or from one that is an attribute, and leave "
            f"out the time, the process and what was read before; `unisono.progress()` has step, "
            f"epoch and shard.",
            indices=(number,),
        )
