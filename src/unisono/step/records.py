"""What every shard tells about a step besides its gradients: its loss and scalars, exactly summed.

A record is written by the worker that computed the shard and read by all::

    form u32 │ number of names u32 │ bytes of names u32 │ – │ (sum f64, weight f64)… │ names, JSON

Sums over shards are taken in the canonical order, so that means have the same bits everywhere.
"""

from __future__ import annotations

import enum
import functools
import json
import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass

from unisono.errors import MismatchError
from unisono.exchange.arena import ROW_BYTES
from unisono.exchange.run_memory import RunMemory
from unisono.plan.summation import tree_sum
from unisono.step.loss import ShardLoss

_HEAD = struct.Struct("<IIII")
_PAIR_BYTES = 16
# What is read of a record at first; most end there.
_FIRST_BYTES = 256


class Form(enum.IntEnum):
    """Which form of loss a shard had."""

    EMPTY = 0
    MEAN = 1
    SUM = 2


@dataclass(frozen=True, slots=True)
class StepTotals:
    """What all shards of a step had to say together.

    Attributes:
        form: the form of the loss, the same for every shard that is not empty.
        means: by name, the mean over all samples (or the true weight) of the step.
        weight: the global weight of the loss.
    """

    form: Form
    means: dict[str, float]
    weight: float


class Records:
    """Writes and reads the records of one run's shards. Final."""

    def __init__(self, memory: RunMemory, num_shards: int) -> None:
        self._memory = memory
        self._num_shards = num_shards

    def write(self, shard: int, loss: ShardLoss | None) -> None:
        """Publish one shard's record; None for an empty shard.

        Raises:
            ValueError: there are more names than a record can hold.
        """
        if loss is None:
            self._memory.write_record(shard, _HEAD.pack(Form.EMPTY, 0, 0, 0))
            return
        names = _text_of(tuple(loss.scalars))
        pairs = [number for pair in loss.scalars.values() for number in pair]
        head = _HEAD.pack(Form.SUM if loss.is_sum else Form.MEAN, len(pairs) // 2, len(names), 0)
        record = head + struct.pack(f"<{len(pairs)}d", *pairs) + names
        if len(record) > ROW_BYTES:
            raise ValueError(
                f"the scalars of a loss must fit {ROW_BYTES} bytes with their names, but "
                f"{len(loss.scalars)} scalars take {len(record)}: return fewer, or shorter names."
            )
        self._memory.write_record(shard, record)

    def read(self) -> list[Record]:
        """Read the records of all shards; the same on every worker."""
        return [self._record(shard) for shard in range(self._num_shards)]

    def totals(self, records: Sequence[Record]) -> StepTotals:
        """Add up the records of all shards.

        Raises:
            MismatchError: shards disagree about the form of the loss or the names.
            ValueError: the weights add up to nothing.
        """
        speaker = next(shard for shard, record in enumerate(records) if record.form != Form.EMPTY)
        for shard, record in enumerate(records):
            if record.form != Form.EMPTY and not record.is_like(records[speaker]):
                raise MismatchError(
                    f"the loss function must return the same form and the same names for every "
                    f"shard, but shards {speaker} and {shard} differ: return the same keys always."
                )
        pairs = [record.pairs(records[speaker].num_names) for record in records]
        total = tree_sum(pairs, lambda *two: [a + b for a, b in zip(*two, strict=True)])
        sums, weights = total[0::2], total[1::2]
        if not weights[0] > 0:
            raise ValueError(
                f"the weights of a step's shards must add up to more than 0, but give "
                f"{weights[0]}: return (sum, weight) with the number of things summed."
            )
        means = {
            name: total / weight if weight else math.nan
            for name, total, weight in zip(records[speaker].names(), sums, weights, strict=True)
        }
        return StepTotals(Form(records[speaker].form), means, weights[0])

    def _record(self, shard: int) -> Record:
        data = self._memory.read_record(shard, _FIRST_BYTES)
        form, num_names, num_bytes, _ = _HEAD.unpack_from(data)
        size = _HEAD.size + num_names * _PAIR_BYTES + num_bytes
        if size > _FIRST_BYTES:
            data = self._memory.read_record(shard, size)
        return Record(form, num_names, data[_HEAD.size : size])


def non_finite_shard(records: Sequence[Record]) -> tuple[int, float] | None:
    """Find the first shard whose loss is NaN or infinite, and that loss."""
    for shard, record in enumerate(records):
        if record.form != Form.EMPTY:
            total, weight = record.pairs(1)[:2]
            if not math.isfinite(total):
                return shard, total / weight if weight else total
    return None


class Record:
    """One shard's record, as read. Final.

    Args:
        form: see :class:`Form`.
        num_names: how many scalars it has.
        data: their sums and weights, and the names.
    """

    __slots__ = ("_names", "_pairs", "form", "num_names")

    def __init__(self, form: int, num_names: int, data: bytes) -> None:
        self.form, self.num_names = form, num_names
        self._pairs = struct.unpack_from(f"<{2 * num_names}d", data)
        self._names = data[num_names * _PAIR_BYTES :]

    def is_like(self, other: Record) -> bool:
        """Tell whether another shard has the same form of loss and the same names."""
        return self.form == other.form and self._names == other._names

    def names(self) -> tuple[str, ...]:
        """Name the scalars, the loss first."""
        return _names_in(self._names)

    def pairs(self, num_names: int) -> list[float]:
        """Give sum, weight, sum, weight, …; all zero where the shard is empty."""
        return list(self._pairs) or [0.0] * (2 * num_names)


# Every step has the same names.
@functools.lru_cache(maxsize=64)
def _names_in(text: bytes) -> tuple[str, ...]:
    return tuple(map(str, json.loads(text)))


@functools.lru_cache(maxsize=64)
def _text_of(names: tuple[str, ...]) -> bytes:
    return json.dumps(names).encode()
