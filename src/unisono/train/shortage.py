"""What did a step need when memory was full, and what can be done? Put into words.

A pure function of what was measured; ``out_of_memory.py`` measures. ::

    torch's error        which allocation failed
    what is measured     parameters, gradients, state, buffers, activations; what the device has
    what is known        shards, precision, workers on one device  ──► what may help, in order
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from unisono.quantities import size

IN_A_PASS = ("copy of a batch", "forward pass", "backward pass")
IN_AN_UPDATE, OF_A_SWEEP = "update", "pass of"
_OTHERS_FROM = 0.02  # of a device: what other processes take is worth telling


@dataclass(frozen=True)
class Shortage:
    """A device without enough memory, as one worker met it. Sizes are in bytes."""

    device: str  # what torch calls it
    rank: int  # the worker
    phase: str  # what it was in
    step: int | None = None  # where; None outside of training, or of a pass
    shard: int | None = None  # likewise
    # what takes memory on the device, by what it is for
    needed: Mapping[str, int] = field(default_factory=dict)
    # the most that tensors of this process have taken; None where it is not counted
    peak: int | None = None
    total: int | None = None  # of the device; None where nobody knows
    free: int | None = None  # likewise
    reserved: int = 0  # what this process keeps of it
    shards: int | None = None  # of the run; None where it has none yet
    batch_size: int | None = None  # likewise
    precision: str | None = None  # of the passes; None in custom training loops
    workers_per_device: int = 1  # that share it
    is_host: bool = False  # whether it is the memory of the host
    num_devices: int = 1  # of this type on this machine
    is_split: bool = False  # whether the model is split over several of them

    @property
    def activations(self) -> int | None:
        """What was taken beyond :attr:`needed` at the peak: activations and temporary tensors."""
        return None if self.peak is None else max(self.peak - sum(self.needed.values()), 0)

    @property
    def by_others(self) -> int:
        """What other processes keep of the device."""
        if self.total is None or self.free is None or self.is_host:
            return 0
        return max(self.total - self.free - self.reserved, 0)

    @property
    def all_needed(self) -> dict[str, int]:
        """What takes memory, with activations where they are known."""
        more = {} if self.activations is None else {"activations": self.activations}
        return {**self.needed, **more}


def in_words(shortage: Shortage) -> str:
    """Say what was needed, what there is, and what to do."""
    whose = "this machine" if shortage.is_host else shortage.device
    return (
        f"the memory of {whose} must hold what the {shortage.phase}{_where(shortage)} needs, but "
        f"rank {shortage.rank} found it full: {_sizes(shortage)}{_room(shortage)}. To make room: "
        f"{'; or '.join(_remedies(shortage))}."
    )


def _where(shortage: Shortage) -> str:
    shard = "" if shortage.shard is None else f" of shard {shortage.shard}"
    return shard + ("" if shortage.step is None else f" in step {shortage.step}")


def _sizes(shortage: Shortage) -> str:
    told = [f"{name} {size(taken)}" for name, taken in shortage.needed.items()]
    if shortage.activations is not None:
        told.append(f"activations and temporary tensors up to {size(shortage.activations)} so far")
    return ", ".join(told)


def _room(shortage: Shortage) -> str:
    if shortage.total is None:
        return ""
    told = f"; it has {size(shortage.total)}"
    if _has_others(shortage):
        told += f", of which other processes take {size(shortage.by_others)}"
    return told


def _has_others(shortage: Shortage) -> bool:
    return bool(shortage.total) and shortage.by_others > _OTHERS_FROM * (shortage.total or 0)


def _remedies(shortage: Shortage) -> Iterator[str]:
    if shortage.workers_per_device > 1:
        yield f"share the device with fewer workers (now {shortage.workers_per_device})"
    elif _has_others(shortage):
        yield "end the other processes that use the device"
    if shortage.phase not in IN_A_PASS:
        yield from _split(shortage)
    if shortage.phase == IN_AN_UPDATE:
        yield "pass `foreach=False` to the optimizer, whose updates then take less at once"
        yield "take an optimizer with less state"
        return
    if shortage.phase in IN_A_PASS:
        yield from _more_shards(shortage.shards, shortage.batch_size)
    elif shortage.phase.startswith(OF_A_SWEEP):
        yield "pass a smaller `batch_size` there"
    else:
        yield "take a smaller model, or an optimizer with less state"
        return
    if shortage.precision == "fp32":
        yield 'pass `precision="bf16"`'
    elif shortage.precision is None:
        yield "compute in bfloat16 with `torch.autocast`"
    if shortage.phase in IN_A_PASS:
        yield "have the model recompute activations (`torch.utils.checkpoint`)"
        yield from _split(shortage)


def _split(shortage: Shortage) -> Iterator[str]:
    if shortage.is_split:
        yield f"give {shortage.device} fewer layers (`balance=` of `unisono.split`)"
    elif shortage.num_devices > 1 and not shortage.is_host:
        yield "put parts of the model on several devices (`unisono.split`)"


def _more_shards(shards: int | None, batch_size: int | None) -> Iterator[str]:
    if shards is None or (batch_size is not None and batch_size <= shards):
        return
    more, samples = 2 * shards, "half as many samples"
    if batch_size is not None and batch_size < more:
        more, samples = batch_size, "one sample"
    yield (
        f"pass `shards={more}` (now {shards}), so that each pass has {samples} at the same batch "
        f"size; other shards give other bits"
    )
