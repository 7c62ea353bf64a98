"""Is a sample a function of its index? One is read twice now and then, and compared in bits.

Whatever else it depends on (how often this process has read, what it has read before, the time)
depends on how many processes there are. Both readings begin with the same seeds, so these must be
the same after both:

* the sample, and the batch that `collate_fn` makes of it,
* how far the generators have come: a data set that keeps what it drew may draw nothing again,
* the numbers that the program's own objects hold, the lengths of their lists, small tensors: what
  accumulates shows there before it shows in a sample.

A first reading may open files and fill caches. What it leaves behind is welcome, if the second one
leaves it so, and if it is the same where the first one begins with other seeds. It happens where
samples are read, before the first batch and then as often as costs 0.3 % of the time, and never
again where a sample takes long. Streams cannot be read twice.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple

from unisono.data.collating import Collator
from unisono.errors import LoadingError
from unisono.runtime.device import drawn_so_far
from unisono.runtime.held import Held, hashed

_PART_OF_TIME = 0.003
_LONG_S = 0.1
_LOOKED_AT = 1 << 20  # bytes of a tensor or an array
_RULE = (
    "a sample must depend on its index and the random numbers that are seeded for it alone, as "
    "what was read before differs with the number of workers, but"
)
_APART = (
    "draw outside of what is kept, or from a generator that is made of the index, such as "
    "`numpy.random.default_rng(index)`."
)
_KEPT = (
    "the data set draws random numbers when it reads a sample for the first time, and not when it "
    f"reads it again, as if it kept what it drew: {_APART}"
)
_OTHERS = (
    "the same sample has other values when it is read again: draw from torch's, numpy's or "
    "Python's default generator, or from one that is an attribute, and leave out the time, the "
    "process and what was read before; `unisono.progress()` has step, epoch and shard."
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

    def look(self, read: Callable[[int], Any], numbers: Sequence[int], epoch: int) -> None:
        """Read samples twice.

        Args:
            read: gives a list of them; seeds generators before, otherwise for another number.
            numbers: the samples'.

        Raises:
            LoadingError: they are not the same twice.
        """
        begun_at_s, is_first = time.perf_counter(), self._due_at_s == -math.inf
        self._due_at_s = math.inf
        reading = partial(self._reading, read, numbers, epoch)
        try:
            before = self._held(closely=True)
            once = reading()
            long_s = time.perf_counter() - begun_at_s
            # Some make their generators only when they are read for the first time.
            if is_first and self._collator.own.look():
                once = reading()
            again = reading()
            reason = once.differs_from(again)
            # A cache that is full was emptied, say: what goes on does so each time.
            if reason and not reason.startswith(_KEPT) and once.told == again.told:
                reason = again.differs_from(reading())
            reason = reason or _kept_of_drawn(before, again, reading)
        except Exception:  # the batch will raise it, too
            return
        if reason:
            raise LoadingError(f"{_RULE} {reason}", indices=tuple(numbers[:1]))
        if long_s < _LONG_S:
            now_s = time.perf_counter()
            self._due_at_s = now_s + (now_s - begun_at_s) / _PART_OF_TIME

    def _held(self, *, closely: bool = False) -> Held:
        holders = self._collator.own.holders
        return Held(holders, at_most=_LOOKED_AT, closely=closely, copied=_LOOKED_AT)

    def _reading(
        self, read: Callable[[int], Any], numbers: Sequence[int], epoch: int, seeds: int = 0
    ) -> _Reading:
        own = self._collator.own
        # Where it is read without any code.
        self._collator.seed_for("sample", epoch, numbers[0], seeds)
        samples = read(seeds)
        told, drawn = hashed(samples), hashed([drawn_so_far(), own.states()])
        if self._collator.is_programs:
            with suppress(LoadingError):  # some do not take one sample
                told += hashed(self._collator.collate(numbers, samples, epoch, seeds))
            drawn += hashed([drawn_so_far(), own.states()])
        return _Reading(told, drawn, self._held())


def _kept_of_drawn(before: Held, once: _Reading, reading: Callable[..., _Reading]) -> str:
    """Say what was kept of random numbers at the first reading; empty if nothing was.

    Args:
        before: what was held then.
        once: what it has left.
        reading: reads again, with other seeds for another number.
    """
    written = before.written_in(once.held)
    if not written:
        return ""
    other = reading(1)
    kept = [way for way in written if not once.held.differs_in(way, other.held, is_alike=True)]
    for way in kept:
        before.put_back(way, other.held)
    anew = reading(1)
    for way in kept:
        before.put_back(way, anew.held)
    reading()  # so that it holds what it held
    for way in kept:
        if once.held.differs_in(way, anew.held, is_alike=True):
            return f"`{way}` keeps what was drawn when a sample was read first: {_APART}"
    return ""


class _Reading(NamedTuple):
    """What one reading has left."""

    told: str  # the samples
    drawn: str  # how far generators have come
    held: Held  # by the program's objects

    def differs_from(self, again: _Reading) -> str:
        """Say what is not the same after another one, and what to do; empty if all is."""
        for name in self.held.changed_in(again.held):
            return (
                f"`{name}` changes each time the same sample is read: leave that out, and take "
                f"what changes in the course of training from `unisono.progress()`, which has "
                f"step, epoch and shard."
            )
        if self.drawn != again.drawn:
            return _KEPT
        return _OTHERS if self.told != again.told else ""
