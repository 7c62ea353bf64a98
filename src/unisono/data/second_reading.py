"""Is a sample a function of its index? Some are read twice, and their bits compared.

Anything else that a sample depends on (how often this process has read, what it has read before,
the time) depends on the number of processes. All readings begin with the same seeds, so the
following must be equal after each (``rehearsal.py``), even if another sample, or the same one with
other seeds, is read before it:

* the sample, and the batch that `collate_fn` makes of it,
* the state of the generators: a dataset that keeps what it drew may draw nothing again.

A first reading may open files and fill caches. Samples are checked where they are read: in the
first batch, in those whose numbers are powers of two, and, unless a sample takes long, as often as
costs 0.3 % of the time. Streams cannot be read twice.
"""

from __future__ import annotations

import itertools
import math
import os
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, final

from unisono.data.collating import Collator
from unisono.errors import LoadingError
from unisono.programs.account import Account, ChangedPlace, over_shared_memory
from unisono.programs.hashes import hashed
from unisono.programs.holders import drawn_by
from unisono.programs.rehearsal import Dependence, Rehearsal, Seen
from unisono.runtime.device import drawn_so_far

_PART_OF_TIME = 0.003
_LONG_S = 0.1
_DRAWN = "drawn"
_RULE = (
    "a sample must depend on its index and the random numbers that are seeded for it alone, as "
    "what was read before differs with the number of workers, but"
)
_APART = (
    "draw outside of what is kept, or from a generator that is made of the index, such as "
    "`numpy.random.default_rng(index)`."
)
_KEPT = (
    "the dataset draws random numbers when it reads a sample for the first time, and not when it "
    f"reads it again, as if it kept what it drew: {_APART}"
)
_MADE = "made"
COUNTS_LINE = (
    "`{}` changes whenever this process reads a sample, but other workers read other samples, and "
    "some are read twice: count from `step.indices`, as in `on_step_end`"
)
_OTHERS = (
    "reading the same sample twice gave different values: draw from torch's, numpy's or "
    "Python's default generator, or from one that is an attribute, and leave out the time, the "
    "process and what was read before; `unisono.progress()` has step, epoch and shard."
)


@final
class SecondReading:
    """Checks the samples of one process in one loop; `tell` receives a line about counts."""

    def __init__(
        self, collator: Collator, tell: Callable[[str], object] = lambda line: None
    ) -> None:
        self._tell = tell
        self._collator, self._pid = collator, os.getpid()
        self._due_at_s = -math.inf
        self._num_batches = 0
        self._begun: Account | None = None
        self._last: Account | None = None
        self._written: set[tuple[int, str]] = set()
        self._earlier: Callable[[], Seen] | None = None

    def is_due(self) -> bool:
        """Return whether a check is due; call it once for each batch."""
        self._num_batches += 1
        is_power = self._num_batches & (self._num_batches - 1) == 0
        return is_power or time.perf_counter() >= self._due_at_s

    def compare(
        self,
        read: Callable[[Sequence[int], int], Any],
        numbers: Sequence[int],
        other: Sequence[int],
        epoch: int,
    ) -> None:
        """Read the samples with these `numbers` twice; raise LoadingError if they differ.

        `read` returns a list of them; it seeds generators before, differently for another number.
        The `other` samples are read in between.
        """
        begun_at_s, is_first = time.perf_counter(), self._begun is None
        self._due_at_s = math.inf
        try:
            finding = self._finding(read, numbers, other, epoch, is_first=is_first)
        except Exception:  # reading the batch will raise it as well
            return
        if finding is not None:
            raise LoadingError(f"{_RULE} {_reason(finding)}", indices=tuple(numbers[:1]))
        now_s = time.perf_counter()
        if now_s - begun_at_s < _LONG_S:
            self._due_at_s = now_s + (now_s - begun_at_s) / _PART_OF_TIME

    def _finding(
        self,
        read: Callable[[Sequence[int], int], Any],
        numbers: Sequence[int],
        other: Sequence[int],
        epoch: int,
        *,
        is_first: bool,
    ) -> Dependence | None:
        def reading() -> Seen:
            return self._reading(read, numbers, epoch, 0)

        if not is_first and (path := self._unseeded(reading)):
            return Dependence(path, _MADE)
        before = self._account()
        once = reading()
        if not is_first and (path := self._unseeded(reading)):
            return Dependence(path, _MADE)
        # Some datasets create their generators only when they are first read.
        if is_first and self._collator.own.search():
            before = self._account()
            once = reading()
        others: dict[str, Callable[[], Any]] = {
            _DRAWN: lambda: self._reading(read, numbers, epoch, 1),
            "another sample": lambda: self._reading(read, other, epoch, 0),
        }
        if self._earlier is not None:
            others["an earlier sample"] = self._earlier
        self._earlier = reading
        moments = [before] if self._begun is None else [before, self._begun]
        self._begun = moments[-1]
        tell = self._tell_counts
        rehearsal = Rehearsal(self._account, reading, self._written, None, others, tell)
        finding = rehearsal.judge(moments, once)
        if finding is None:
            before.put_back()
        return finding

    def _tell_counts(self, left: Account, grown: Sequence[ChangedPlace]) -> None:
        if os.getpid() != self._pid:
            return  # the program never sees what a loader process counts
        paths = (path for each in grown for path in each.numbers(left.content(each.holder)))
        for path in itertools.islice(paths, 1):
            self._tell(COUNTS_LINE.format(path))

    def _unseeded(self, reading: Callable[[], Seen]) -> str:
        """Return the path to a generator made since the last look that samples draw from."""
        made = self._collator.own.made()
        if not made:
            return ""
        drawn = {path: drawn_by(generator) for path, generator in made.items()}
        seen = reading()
        for path, generator in made.items():
            if drawn_by(generator) != drawn[path]:
                return path
        # Samples may draw from a copy: once it is found, a generator is seeded for each sample.
        self._collator.own.search()
        return "" if reading() == seen else next(iter(made))

    def _account(self) -> Account:
        own = self._collator.own
        own.search()
        apart = own.apart
        if os.getpid() != self._pid:
            # In a loader process, restoring would overwrite what the worker has set since.
            apart = apart | over_shared_memory(own.holders)
        self._last = Account(own.holders, apart=apart, like=self._last)
        return self._last

    def _reading(
        self,
        read: Callable[[Sequence[int], int], Any],
        numbers: Sequence[int],
        epoch: int,
        seeds: int,
    ) -> Seen:
        own = self._collator.own
        # Needed if reading runs no code.
        self._collator.seed_for("sample", epoch, numbers[0], seeds)
        samples = read(numbers, seeds)
        told, drawn = hashed(samples), hashed([drawn_so_far(), own.states()])
        if self._collator.is_programs:
            with suppress(LoadingError):  # some cannot collate one sample
                told += hashed(self._collator.collate(numbers, samples, epoch, seeds))
            drawn += hashed([drawn_so_far(), own.states()])
        return {"told": told, _DRAWN: drawn}


def _reason(finding: Dependence) -> str:
    path = f"`{finding.path}`"
    if finding.differs == _MADE:
        return (
            f"samples draw from {path}, a generator that the dataset has made after its first "
            f"batch, so it is not seeded for each sample: make it in `__init__`, or make it of "
            f"the index, such as `numpy.random.default_rng(index)`."
        )
    if _DRAWN in (finding.differs, finding.after):
        kept = (
            f"{path} keeps something of earlier readings (what was drawn, or how many there were), "
            f"and samples depend on it: compute statistics before training; {_APART}"
        )
        return kept if finding.path else _KEPT
    if not finding.path:
        return _OTHERS
    if finding.after:
        return (
            f"{path} keeps something of the sample that is read first, and other samples depend on "
            f"it: compute it before training, from all samples or from fixed ones."
        )
    return (
        f"{path} changes each time the same sample is read, and the sample depends on it: leave "
        f"that out, and take what changes in the course of training from `unisono.progress()`, "
        f"which has step, epoch and shard."
    )
