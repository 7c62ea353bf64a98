"""A shard's loss and scalars of a step, read by all workers and summed exactly alike.

A record is written by the worker that computed the shard::

    form u32 │ number of names u32 │ bytes of names u32 │ rows u32 │ options u32 │ seen u32 │
    (sum f64, weight f64)… │ names, JSON

Sums over shards are taken in the canonical order, so means have the same bits everywhere.
"""

from __future__ import annotations

import enum
import functools
import json
import math
import struct
from collections.abc import Mapping, Sequence
from time import perf_counter
from typing import NamedTuple, final

import torch

from unisono.engine.exchange.exchange import Exchange
from unisono.engine.step.loss import PendingLosses, ShardLoss, name_of
from unisono.errors import MismatchError
from unisono.plan.summation import tree_sum

_HEAD = struct.Struct("<IIIIII")
_PAIR_BYTES = 16
_EMPTY, _MEAN, _SUM = range(3)  # forms of a shard's loss


class StepMeans(dict[str, float]):
    """The means, by name, over all samples of a step or over the true weight.

    `sums` contains, for each mean, the sum and its weight; for a count, the sum and None.
    """

    def __init__(self, sums: Mapping[str, tuple[float, float | None]]) -> None:
        super().__init__({name: mean_of(*pair) for name, pair in sums.items()})
        self.sums = sums


@final
class UndoneMeans(StepMeans):
    """The means that an undone step shows: those of the last finished step, or NaN.

    A program reads them after the block, whether a worker was lost or not.
    """

    def __init__(self, before: Mapping[str, float]) -> None:
        super().__init__({})
        self.update(before)

    def __missing__(self, name: str) -> float:
        return math.nan


def mean_of(total: float, weight: float | None) -> float:
    """Divide a sum by its weight; return a count, whose weight is None, as an integer."""
    if weight is None:
        return int(total)
    return total / weight if weight else math.nan


class Record(NamedTuple):
    """One shard's record, as read."""

    form: int
    pairs: tuple[float, ...]  # sum, weight, sum, weight, … of its scalars
    names: bytes  # theirs, the loss first, in JSON
    has_rows: int  # whether there are values per sample
    options: int  # a hash of the writer's optimizer options
    seen: int  # a hash of the writer's replica of the state; 0: not compared


@final
class Records:
    """Writes and reads the records of one loop's shards."""

    def __init__(self, exchange: Exchange) -> None:
        self._rows, self._is_host = exchange.memory.arena.rows, exchange.device.is_host
        self.pending = PendingLosses(exchange.copies)
        self.per_sample: dict[int, dict[str, torch.Tensor]] = {}  # by shard computed here
        self.all: list[Record] = []  # once all shards of a step are done
        self.bad: tuple[int, float] | None = None  # a shard whose loss is not finite, and that
        self._speaker, self.has_rows = 0, False
        self.options = self.seen = 0

    def clear(self) -> None:
        """Discard the records of the previous update."""
        self.pending.losses.clear()
        self.per_sample.clear()

    def add(self, shard: int, loss: ShardLoss) -> None:
        """Publish the record of a shard computed here; on an accelerator :meth:`send` does."""
        if loss.per_sample:
            self.per_sample[shard] = loss.per_sample
        if self._is_host:
            self.write(shard, loss)
        else:
            self.pending.losses.append((shard, loss))

    def send(self) -> None:
        """Publish the pending records; waits for the device."""
        for shard, loss in self.pending.read():
            self.write(shard, loss)

    def write(self, shard: int, loss: ShardLoss | None) -> None:
        """Publish one shard's record; None for an empty shard."""
        row = self._rows[shard]
        if loss is None:
            _HEAD.pack_into(row, 0, _EMPTY, 0, 0, 0, 0, self.seen)
            return
        names = _text_of(tuple(loss.scalars))
        pairs = [number for pair in loss.scalars.values() for number in pair]
        form, has_rows = _SUM if loss.is_sum else _MEAN, bool(loss.per_sample)
        head = _HEAD.pack(form, len(pairs) // 2, len(names), has_rows, self.options, self.seen)
        record = head + struct.pack(f"<{len(pairs)}d", *pairs) + names
        if len(record) > len(row):
            raise ValueError(
                f"the scalars of a loss must fit {len(row)} bytes with their names, but "
                f"{len(loss.scalars)} scalars take {len(record)}: return fewer, or shorter names."
            )
        row[: len(record)] = record

    def read(self) -> list[Record]:
        """Return the records of all shards, which are the same on every worker."""
        self.all = records = [_read(row) for row in self._rows]
        self._speaker = next(at for at, record in enumerate(records) if record.form != _EMPTY)
        self.has_rows, self.bad = bool(records[self._speaker].has_rows), None
        for shard, record in enumerate(records):
            if record.pairs and not math.isfinite(total := record.pairs[0]):
                self.bad = shard, total / record.pairs[1] if record.pairs[1] else total
                break
        return records

    def totals(self) -> tuple[StepMeans, float | None]:
        """Sum the records of all shards; return means, and the weight of losses that are sums."""
        records = self.all
        speaker, first = self._speaker, records[self._speaker]
        for shard, record in enumerate(records):
            if record.form == _EMPTY:
                continue
            if record.options != first.options:
                raise MismatchError(
                    f"an optimizer's options must be the same on every worker, but they are not "
                    f"where shards {speaker} and {shard} are computed: set them on every worker "
                    f"alike, not under `if rank == 0`, not from the time, and not from what is not "
                    f"kept with the run (a line says what), as a worker that joins lacks it."
                )
            if record.form != first.form or record.names != first.names:
                raise MismatchError(
                    f"the loss function must return the same form and the same names for every "
                    f"shard, but shards {speaker} and {shard} differ: return the same keys always, "
                    f"each as an integer (a count) always or never."
                )
        nothing = (0.0,) * len(first.pairs)
        pairs: list[Sequence[float]] = [record.pairs or nothing for record in records]
        total = tree_sum(pairs, lambda *two: [a + b for a, b in zip(*two, strict=True)])
        sums, weights = total[0::2], total[1::2]
        if not weights[0] > 0:
            raise ValueError(
                f"the weights of a step's shards must add up to more than 0, but give "
                f"{weights[0]}: return (sum, weight) with the number of things summed."
            )
        means = {
            name: (value, None if is_count else weight)
            for (name, is_count), value, weight in zip(
                _names_in(first.names), sums, weights, strict=True
            )
        }
        return StepMeans(means), weights[0] if first.form == _SUM else None


def _read(row: memoryview) -> Record:
    form, num_names, num_bytes, has_rows, options, seen = _HEAD.unpack_from(row)
    pairs = struct.unpack_from(f"<{2 * num_names}d", row, _HEAD.size)
    names_at = _HEAD.size + num_names * _PAIR_BYTES
    names = bytes(row[names_at : names_at + num_bytes])
    return Record(form, pairs, names, has_rows, options, seen)


# Every step has the same names.
@functools.lru_cache(maxsize=64)
def _names_in(text: bytes) -> tuple[tuple[str, bool], ...]:
    return tuple(map(name_of, json.loads(text)))


@functools.lru_cache(maxsize=64)
def _text_of(names: tuple[str, ...]) -> bytes:
    return json.dumps(names).encode()


class Phase(enum.IntEnum):
    """A phase of a worker's step; the index of its seconds in :attr:`PhaseTimers.times`."""

    LOADING = 1
    FORWARD = 2
    BACKWARD = 3
    WAITING = 4
    SUMMING = 5
    UPDATING = 6


@final
class PhaseTimers:
    """Adds up the seconds of each phase.

    Attributes:
        times: the time of ``perf_counter`` when the step began, then the seconds of each phase. All
            processes of a Linux host share that clock.
    """

    def __init__(self) -> None:
        self.times = [0.0] * (len(Phase) + 1)
        self._at_s = 0.0

    def begin(self) -> None:
        """Begin a step."""
        self._at_s = perf_counter()
        self.times = [self._at_s, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0]

    def lap(self, phase: Phase) -> None:
        """Add the time since the previous lap to `phase`."""
        now_s = perf_counter()
        self.times[phase] += now_s - self._at_s
        self._at_s = now_s
