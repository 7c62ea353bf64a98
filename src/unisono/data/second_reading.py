"""Is a sample a function of its index? One is read twice now and then, and compared in bits.

Whatever else it depends on (how often this process has read, what it has read before, the time)
depends on how many processes there are. All readings begin with the same seeds, so these must be
the same after each (``repeated.py``):

* the sample, and the batch that `collate_fn` makes of it,
* how far the generators have come: a data set that keeps what it drew may draw nothing again,
* what the program's own objects hold, which shows what accumulates before a sample does.

A first reading may open files and fill caches. What it leaves behind is welcome if it is the same
where a reading with other seeds comes before it. It happens where samples are read, before the
first batch and then as often as costs 0.3 % of the time, and never again where a sample takes long.
Streams cannot be read twice.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from unisono.data.collating import Collator
from unisono.errors import LoadingError
from unisono.runtime.device import drawn_so_far
from unisono.runtime.held import Held, hashed
from unisono.runtime.repeated import Orders, Seen, difference, what_goes_on

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
    """Looks at the samples of one process in one loop. Final."""

    def __init__(self, collator: Collator) -> None:
        self._collator = collator
        self._due_at_s = -math.inf

    def is_due(self) -> bool:
        """Tell whether it is time to look."""
        return time.perf_counter() >= self._due_at_s

    def look(self, read: Callable[[int], Any], numbers: Sequence[int], epoch: int) -> None:
        """Read samples with these `numbers` twice; raises LoadingError if they are not the same.

        `read` gives a list of them; it seeds generators before, otherwise for another number.
        """
        begun_at_s, is_first = time.perf_counter(), self._due_at_s == -math.inf
        self._due_at_s = math.inf

        def reading(seeds: int = 0) -> Seen:
            return self._reading(read, numbers, epoch, seeds)

        try:
            before = self._held()
            once = reading()
            long_s = time.perf_counter() - begun_at_s
            # Some make their generators only when they are read for the first time.
            if is_first and self._collator.own.look():
                once = reading()
            reason = self._reason(before, once, reading)
        except Exception:  # the batch will raise it, too
            return
        if reason:
            raise LoadingError(f"{_RULE} {reason}", indices=tuple(numbers[:1]))
        if long_s < _LONG_S:
            now_s = time.perf_counter()
            self._due_at_s = now_s + (now_s - begun_at_s) / _PART_OF_TIME

    def _reason(self, before: Held, once: Seen, reading: Callable[..., Seen]) -> str:
        """Say what is not the same when a sample is read again, or with other seeds; or nothing."""
        first = self._held()
        again = reading()
        if way := what_goes_on(first, self._held, reading):
            return (
                f"`{way}` changes each time the same sample is read: leave that out, and take "
                f"what changes in the course of training from `unisono.progress()`, which has "
                f"step, epoch and shard."
            )
        if differs := difference(once, again):
            return _KEPT if differs == "drawn" else _OTHERS
        if ways := before.written_in(self._held()):
            orders = Orders(before, ways, self._held, is_alike=True)
            others = partial(reading, 1)
            if way := orders.what_goes_on(reading, others, others()):
                return f"`{way}` keeps what was drawn when a sample was read first: {_APART}"
        return ""

    def _held(self) -> Held:
        return Held(self._collator.own.holders, at_most=_LOOKED_AT)

    def _reading(
        self, read: Callable[[int], Any], numbers: Sequence[int], epoch: int, seeds: int
    ) -> Seen:
        own = self._collator.own
        # Where it is read without any code.
        self._collator.seed_for("sample", epoch, numbers[0], seeds)
        samples = read(seeds)
        told, drawn = hashed(samples), hashed([drawn_so_far(), own.states()])
        if self._collator.is_programs:
            with suppress(LoadingError):  # some do not take one sample
                told += hashed(self._collator.collate(numbers, samples, epoch, seeds))
            drawn += hashed([drawn_so_far(), own.states()])
        return {"drawn": drawn, "told": told}
