"""What each shard hands from one batch to the next: hidden states, memories (``carry=True``).

::

    step n      each shard's value of step n ─► its pass ─► its value of step n + 1
    publish     values of step n + 1 ─► memory that all see ── all meet ── update
    step n + 1  whoever computes the shard has its value, or reads it there

A shard has two places there, for even and for odd steps: what a step starts with stays until that
step is done, for those who take over shards of a lost worker. At the start of an epoch there is
none. Snapshots have all values, as this is an object with a state in ``run.state``.

Each of several hosts has such memory, with the values of its own shards. The others' are brought
there only where they are needed: for a snapshot, and where shards are to be others'.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from unisono.checkpoint.folder import MODEL_FILE, OPTIMIZER_FILE
from unisono.checkpoint.slots import blob_bytes, read_extras, read_facts, used_bytes, write_blob
from unisono.device import Device
from unisono.errors import CheckpointError
from unisono.exchange.snapshots import as_bytes, describe_extras, from_bytes
from unisono.state.packing import keep_in, pack, unpack
from unisono.workers.memory import ALIGNMENT_BYTES, Memory
from unisono.workers.team import Team

_VALUE = "carried"
# Of addresses; pages that are not written do not exist.
_PLACE_BYTES_AT_MOST, _ALL_BYTES = 1 << 30, 1 << 36


class _Packed(NamedTuple):
    """A value, taken apart: plain JSON, and copies of its tensors, where they were computed."""

    plain: Any
    tensors: Mapping[str, torch.Tensor]


_NOTHING = _Packed(None, {})

Bring = Callable[[Sequence[Sequence[memoryview]]], None]
"""Brings bytes from each host to the same place on all others; see ``Exchange.bring``."""


class CarriedStates:
    """The values of all shards, as far as one worker knows them. Final."""

    def __init__(self, num_shards: int) -> None:
        self._num_shards, self._step = num_shards, 0
        self._now: dict[int, _Packed] = {}  # of the step under way
        self._next: dict[int, _Packed] = {}
        self._unpublished: set[int] = set()
        self._memory: Memory | None = None
        self._place_bytes = min(_PLACE_BYTES_AT_MOST, _ALL_BYTES // (2 * num_shards))
        self._place_bytes -= self._place_bytes % ALIGNMENT_BYTES

    def bind(self, team: Team, key: int) -> None:
        """Begin a loop. Collective.

        Args:
            key: names the memory.
        """
        if not team.supervisor.is_alone:  # else there is nobody to tell
            self._memory = team.memory(key, 2 * self._num_shards * self._place_bytes)

    def unbind(self) -> None:
        """Have all values of this host here, at a loop's end; not collective."""
        for shard in range(self._num_shards):
            self._of(shard)
        self._memory = None

    def collect(self, team: Team, bring: Bring) -> None:
        """Have the values of all shards on every host. Collective, between two steps.

        Raises:
            ValueError: one is larger than there is room for.
        """
        memory = self._memory
        if len(team.hosts) == 1 or memory is None:
            return
        said = json.dumps(self._sizes() if team.leads_host else {}).encode()
        heard = team.gather(said, "carried states")
        there = [json.loads(heard[ranks[0]]) for ranks in team.hosts]
        of_host: list[list[memoryview]] = [[] for _ in there]
        for shard in range(self._num_shards):
            having = [host for host, sizes in enumerate(there) if str(shard) in sizes]
            if having and len(having) < len(there):
                place = self._place(shard, self._step)
                of_host[having[0]].append(place[: there[having[0]][str(shard)]])
        bring(of_host)

    def begin(self, step: int, *, is_new: bool) -> None:
        """Start a step; `is_new`: with nothing, as it is the first of an epoch."""
        self._step, self._next = step, {}
        if is_new:
            self._now = dict.fromkeys(range(self._num_shards), _NOTHING)

    def start(self, shard: int, device: Device) -> None:
        """Be ready for one shard's pass, which is computed on `device`."""
        self._shard, self._device = shard, device
        self._next[shard] = self._of(shard)
        self._unpublished.add(shard)

    @property
    def value(self) -> Any:
        """What the pass under way starts with; set: what the next one of its shard does."""
        plain, tensors = self._of(self._shard)
        device = self._device.torch

        def take(label: str) -> torch.Tensor:
            # A copy: the program may change it, and the pass may have to be made again.
            return tensors[label].to(device, copy=True)

        return unpack({_VALUE: plain}, take, _VALUE)[_VALUE]

    @value.setter
    def value(self, value: Any) -> None:
        try:
            self._next[self._shard] = _packed(value)
        except CheckpointError as error:
            raise TypeError(
                f"what is carried must be tensors, numbers and texts, in tuples, lists and dicts, "
                f"but: {error}"
            ) from None

    def publish(self) -> None:
        """Show the others what the shards that were computed here start the next step with.

        Raises:
            ValueError: it is larger than there is room for.
        """
        unpublished, self._unpublished = sorted(self._unpublished), set()
        for shard in unpublished if self._memory is not None else ():
            self._write(shard, self._step + 1, self._next[shard])

    def commit(self) -> None:
        """Finish a step."""
        self._now, self._next, self._step = self._next, {}, self._step + 1

    def state_dict(self) -> dict[str, Any]:
        """Give all values; to be called between two steps."""
        return {
            "step": self._step,
            "values": [
                unpack({_VALUE: plain}, tensors.__getitem__, _VALUE)[_VALUE]
                for plain, tensors in map(self._of, range(self._num_shards))
            ],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over all values."""
        self._step, self._next = state["step"], {}
        self._now = {shard: _packed(value) for shard, value in enumerate(state["values"])}
        self._unpublished.clear()

    def _of(self, shard: int) -> _Packed:
        if shard not in self._now and (read := self._read(shard)) is not None:
            self._now[shard] = read
        return self._now.get(shard, _NOTHING)

    def _read(self, shard: int) -> _Packed | None:
        """Read what another worker has published in the step before, if anybody has."""
        if self._memory is None:
            return None
        place = self._place(shard, self._step)
        try:
            facts = read_facts(place, 0)
        except ValueError:
            return None
        if facts["step"] != self._step:
            return None
        extras = read_extras(place, 0)
        return _Packed(
            facts[_VALUE],
            {said["name"]: from_bytes(bytearray(data), said) for said, data in extras},
        )

    def _sizes(self) -> dict[int, int]:
        """Put what this worker knows where others find it; gives the bytes of each shard's."""
        sizes = {}
        for shard in range(self._num_shards):
            is_there = self._read(shard) is not None
            if not is_there and shard in self._now:
                self._write(shard, self._step, self._now[shard])
            if is_there or shard in self._now:
                sizes[shard] = used_bytes(self._place(shard, self._step), 0)
        return sizes

    def _write(self, shard: int, step: int, packed: _Packed) -> None:
        facts = json.dumps({"step": step, _VALUE: packed.plain}).encode()
        files = {MODEL_FILE: [], OPTIMIZER_FILE: describe_extras(packed.tensors)}
        described = json.dumps(files).encode()
        data = [as_bytes(tensor) for tensor in packed.tensors.values()]
        needed = blob_bytes(len(facts), len(described), [len(one) for one in data])
        if needed > self._place_bytes:
            raise ValueError(
                f"what a shard carries must fit {self._place_bytes:,} bytes, but that of shard "
                f"{shard} takes {needed:,}: carry less, or train with more shards."
            )
        write_blob(self._place(shard, step), 0, facts, described, data)

    def _place(self, shard: int, step: int) -> memoryview:
        assert self._memory is not None
        start = (step % 2 * self._num_shards + shard) * self._place_bytes
        return self._memory.view(start, self._place_bytes)


def _packed(value: Any) -> _Packed:
    tensors: dict[str, torch.Tensor] = {}
    plain = pack(value, _VALUE, keep_in(tensors, str), lambda path: f"`{path}`")
    for label, tensor in tensors.items():
        if tensor.layout != torch.strided or tensor.is_meta:
            kind = "meta" if tensor.is_meta else str(tensor.layout)
            raise CheckpointError(f"`{label}` must be dense and have values, but is {kind}.")
    # Copies: the program may go on with the same memory.
    return _Packed(plain, {label: tensor.clone() for label, tensor in tensors.items()})
