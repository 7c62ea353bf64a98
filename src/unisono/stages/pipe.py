"""How do the stages of a replica send each other tensors? Through memory that they share.

For each pair of stages, in each direction, a counter of what was sent, and as many *slots* as
shards may be in flight. Whatever a shard has to send lies in its slot, one message behind the
other::

    0 → 1   │ sent │ slot 0: header, bytes │ header, bytes │ … │ slot 1 … │
    1 → 0   │ sent │ …

Nobody waits for room: when a slot comes again, its reader has long sent the gradients of the shard
before. What a lost worker had sent stays there. After a change of the membership all count from
where the counters stand.

Invariant: every wait ends, also when the other one was lost (:class:`ReplicaBrokenError`), has
left, or takes too long.
"""

from __future__ import annotations

import ctypes
import enum
import os
import struct
import time
from typing import NamedTuple

import torch

from unisono.device import HOST
from unisono.errors import PeerLostError, WaitTimeoutError
from unisono.timeouts import MEETING
from unisono.workers import futex
from unisono.workers.meeting_point import SLEEP_AT_MOST_S, Departure, spin_s
from unisono.workers.memory import ALIGNMENT_BYTES, aligned
from unisono.workers.team import StepBrokenError, Team
from unisono.workers.waiting import ShownWait, stage_wait_in_words

_HEADER = struct.Struct("<IIIIqqq")  # kind, dtype, dimensions, flags, shard, elements, phase
_HEADER_BYTES = 256
_DIMS_AT_MOST = (_HEADER_BYTES - _HEADER.size) // 16
_LINE_BYTES = 64
_SLOT_BYTES_AT_MOST = 1 << 32
_ALL_BYTES = 1 << 36  # of addresses; pages that are not written do not exist
_REQUIRES_GRAD = 1
_COUNTER = 2**32
_DTYPES = [
    *(torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64),
    *(torch.complex128, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.bool, torch.uint16, torch.uint32, torch.uint64),
    *(torch.float8_e4m3fn, torch.float8_e5m2),
]
_CODES = {dtype: code for code, dtype in enumerate(_DTYPES)}


class MessageKind(enum.IntEnum):
    """What a message has."""

    VALUE = 0
    GENERATORS = 1
    BACKWARD = 2
    NO_BACKWARD = 3
    GRADIENT = 4
    NO_GRADIENT = 5


_ACTIVATIONS = (MessageKind.VALUE, MessageKind.GENERATORS)


class ReplicaBrokenError(StepBrokenError):
    """A worker of this replica was lost."""


class StageMessage(NamedTuple):
    """What was received."""

    kind: MessageKind
    tensor: torch.Tensor | None


class StagePipe:
    """One worker's end of the pipe between the stages of its replica. Final.

    Collective where workers make their memory themselves: every rank makes one.

    Args:
        team: all workers.
        key: names the memory.
        in_flight: how many shards may be in flight.
    """

    def __init__(self, team: Team, key: int, in_flight: int) -> None:
        self._team, self._num_slots = team, in_flight
        self._num_stages, self.stage = team.num_stages, team.stage
        self._replica = team.replica
        num_pairs = self._num_stages**2
        all_pairs = num_pairs * (team.world.world_size // self._num_stages)
        self._slot_bytes = min(_SLOT_BYTES_AT_MOST, _ALL_BYTES // (all_pairs * in_flight))
        self._slot_bytes -= self._slot_bytes % ALIGNMENT_BYTES
        self._pair_bytes = _LINE_BYTES + in_flight * self._slot_bytes
        self._memory = team.memory(key, all_pairs * self._pair_bytes)
        self._first_pair = (team.world.rank // self._num_stages) * num_pairs
        base = ctypes.addressof(ctypes.c_char.from_buffer(self._memory.mapping))
        others = [stage for stage in range(self._num_stages) if stage != self.stage]
        self._out = {to: _End(self._start(self.stage, to), base) for to in others}
        self._in = {of: _End(self._start(of, self.stage), base) for of in others}
        self._timeout_s = MEETING.in_s()
        self._spin_s = spin_s(team.world.world_size)
        self.generation: int | None = None
        self.waited_s = 0.0

    def restart(self) -> bool:
        """Begin to count anew, as others are members now. Collective: every rank calls it.

        Returns:
            Whether all have; False if somebody was lost.
        """
        for end in self._in.values():
            end.count = end.sent
        for end in self._out.values():
            end.shard = -1
        for end in self._in.values():
            end.shard = -1
        self.generation = self._team.membership.generation
        return self._team.meet("stages")

    def send(
        self,
        stage: int,
        shard: int,
        kind: MessageKind,
        tensor: torch.Tensor | None = None,
    ) -> None:
        """Send a message; nobody waits.

        Args:
            stage: to which.
            shard: the number of the shard in flight, counted over all steps.
            kind: what it is.
            tensor: dense or not, it arrives with the same strides.

        Raises:
            TypeError: it cannot be sent.
            ValueError: there is no room for it.
        """
        end = self._out[stage]
        at = end.place(shard, self._slot_bytes, self._num_slots)
        if tensor is None:
            header = _HEADER.pack(kind, 0, 0, 0, shard, 0, 0)
            size = _HEADER_BYTES
        else:
            tensor = _sendable(tensor)
            numel, phase = _extent(tensor), tensor.data_ptr() % ALIGNMENT_BYTES
            flags = _REQUIRES_GRAD if tensor.requires_grad else 0
            code = _CODES[tensor.dtype]
            numbers = (*tensor.shape, *tensor.stride())
            head = _HEADER.pack(kind, code, tensor.dim(), flags, shard, numel, phase)
            header = head + struct.pack(f"<{len(numbers)}q", *numbers)
            size = _HEADER_BYTES + aligned(numel * tensor.itemsize)
        if end.used + size > self._slot_bytes:
            raise ValueError(
                f"what crosses between two stages for one shard must fit {self._slot_bytes:,} "
                f"bytes, but takes more: pass more `shards`, so that each is smaller."
            )
        self._memory.write(at, header)
        if tensor is not None and numel:
            with torch.no_grad():
                flat = tensor.detach().as_strided((numel,), (1,), tensor.storage_offset())
                self._memory.flat(at + _HEADER_BYTES, numel, tensor.dtype).copy_(flat)
        end.used += size
        futex.add_and_wake(end.address)

    def receive(self, stage: int, shard: int, kind: MessageKind, name: int) -> StageMessage:
        """Wait for the next message of a stage, which is about this shard.

        Args:
            stage: which.
            shard: as for :meth:`send`.
            kind: what it will be.
            name: the number of the shard in the step, for words.

        Raises:
            ReplicaBrokenError: a worker of the replica was lost before it had sent it.
            PeerLostError: one has left for good.
            WaitTimeoutError: it did not come in time.
        """
        end = self._in[stage]
        if end.sent == end.count:
            words = "activations" if kind in _ACTIVATIONS else "gradients"
            self._wait(end, stage_wait_in_words(words, stage, name, self._replica[stage]))
        futex.acquire(end.address)
        at = end.place(shard, self._slot_bytes, self._num_slots)
        head = self._memory.read(at, _HEADER_BYTES)
        found, code, dims, flags, its_shard, numel, phase = _HEADER.unpack_from(head)
        assert its_shard == shard, f"shard {its_shard} came where {shard} was due"
        end.count = (end.count + 1) % _COUNTER
        end.used += _HEADER_BYTES
        if found in (MessageKind.BACKWARD, MessageKind.NO_BACKWARD, MessageKind.NO_GRADIENT):
            return StageMessage(MessageKind(found), None)
        dtype = _DTYPES[code]
        numbers = struct.unpack_from(f"<{2 * dims}q", head, _HEADER.size)
        end.used += aligned(numel * dtype.itemsize)
        memory = _placed_alike(numel, dtype, phase)
        if numel:
            memory.copy_(self._memory.flat(at + _HEADER_BYTES, numel, dtype))
        # No view, as what a program changes in place.
        tensor = torch.empty(0, dtype=dtype, device=HOST).set_(
            memory.untyped_storage(), memory.storage_offset(), numbers[:dims], numbers[dims:]
        )
        if flags & _REQUIRES_GRAD:
            tensor.requires_grad_()
        return StageMessage(MessageKind(found), tensor)

    def _start(self, source: int, destination: int) -> int:
        pair = self._first_pair + source * self._num_stages + destination
        return pair * self._pair_bytes

    def _wait(self, end: _End, what: str) -> None:
        begun_s = time.perf_counter()
        until_s = begun_s + self._spin_s
        while end.sent == end.count and time.perf_counter() < until_s:
            os.sched_yield()
        if end.sent == end.count:
            shown = ShownWait()
            try:
                self._sleep(end, what, shown)
            finally:
                shown.close()
        self.waited_s += time.perf_counter() - begun_s

    def _sleep(self, end: _End, what: str, shown: ShownWait) -> None:
        begun_s = time.monotonic()
        while end.sent == end.count:
            self._check_others(end, what)
            waited_s = time.monotonic() - begun_s
            if waited_s >= self._timeout_s:
                raise WaitTimeoutError(
                    f"stage {self.stage} has waited {waited_s:.0f} s for {what}: look at what that "
                    f"rank does there.",
                    missing=(),
                    waited_s=waited_s,
                )
            shown.look(waited_s, lambda: what)
            futex.wait(end.address, end.count, SLEEP_AT_MOST_S)

    def _check_others(self, end: _End, what: str) -> None:
        """Give up if a worker of the replica will not come, and the message is not there either."""
        for rank in self._replica:
            how = self._team.departure(rank)
            if how == Departure.PRESENT or end.sent != end.count:
                continue
            if how == Departure.LOST:
                if self._team.has_gone_further(rank):
                    continue  # it had sent all that it had to
                raise ReplicaBrokenError
            raise PeerLostError(
                f"stage {self.stage} must get {what}, but rank {rank} of its replica has ended: "
                f"look for what ended it, and start all again; with a `directory` the run goes on "
                f"from its newest checkpoint.",
                rank=rank,
            )


class _End:
    """One end of one direction between two stages. Final.

    Attributes:
        address: of the counter.
        count: how many messages this end has received, modulo 2³².
        shard: whose slot messages are in now.
        used: how many bytes of it.
    """

    def __init__(self, start: int, base: int) -> None:
        self._start = start
        self.address = base + start
        self._counter = ctypes.c_uint32.from_address(self.address)
        self.count, self.shard, self.used = self.sent, -1, 0

    @property
    def sent(self) -> int:
        """How many messages were ever sent, modulo 2³²."""
        return int(self._counter.value)

    def place(self, shard: int, slot_bytes: int, num_slots: int) -> int:
        """Say where the next message about a shard lies."""
        if shard != self.shard:
            self.shard, self.used = shard, 0
        return self._start + _LINE_BYTES + shard % num_slots * slot_bytes + self.used


def _sendable(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.layout != torch.strided or tensor.is_nested or tensor.dtype not in _CODES:
        raise TypeError(
            f"what crosses between two stages must be a dense tensor, but one has layout "
            f"{tensor.layout} and {tensor.dtype}: make it dense, or have both layers in one stage."
        )
    if tensor.dim() > _DIMS_AT_MOST:
        raise TypeError(
            f"what crosses between two stages must have at most {_DIMS_AT_MOST} dimensions, but "
            f"has {tensor.dim()}: reshape it, or have both layers in one stage."
        )
    return tensor.resolve_conj().resolve_neg()


def _extent(tensor: torch.Tensor) -> int:
    """Count the elements from a tensor's first to its last in memory, with those in between."""
    if not tensor.numel():
        return 0
    return 1 + sum(
        (size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
    )


def _placed_alike(numel: int, dtype: torch.dtype, phase: int) -> torch.Tensor:
    """Take memory that begins where the other's does in its cache line, as kernels look at that."""
    skipped = phase // dtype.itemsize
    size = numel + skipped + ALIGNMENT_BYTES // dtype.itemsize
    memory = torch.empty(size, dtype=dtype, device=HOST)
    surplus = memory.data_ptr() % ALIGNMENT_BYTES
    first = skipped + (-surplus % ALIGNMENT_BYTES) // dtype.itemsize
    return memory[first : first + numel]
