"""Take a run's whole state apart and restore it, for snapshots, checkpoints and replacements.

The exchange itself saves and loads what it holds: parameters, buffers, maybe the optimizer's state.
"""

from __future__ import annotations

import json
import operator
import time
from collections.abc import Iterable, Mapping
from dataclasses import InitVar, asdict, dataclass, field
from typing import Any, final

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from unisono.engine.state.contents import named_parameters
from unisono.engine.state.optimizer_state import check_keys, group_options, is_in_pieces, take_state
from unisono.engine.state.optimizers import optimizers_of
from unisono.engine.state.packing import check_dtype, pack_state, unpack_state, unpacked_state
from unisono.engine.state.recorded_options import RecordedOptions
from unisono.engine.state.saved import (
    FORMAT,
    CheckpointData,
    apply,
    apply_groups,
    apply_modes,
    check_groups,
    modes_of,
)
from unisono.errors import UnisonoError
from unisono.runtime.checkpoint.sealed import Sealed
from unisono.runtime.checkpoint.slots import Places, files_of, read_facts
from unisono.runtime.workers.launcher_messages import Passed
from unisono.runtime.workers.team import Team


@dataclass(slots=True)
class Position:
    """How far a run has come."""

    step: int = 0  # steps done, over the whole run
    epoch: int = 0  # epochs done
    batch: int = 0  # global batches done in the epoch under way

    def move_to(self, step: int, epoch: int, batch: int) -> None:
        """Set the position."""
        self.step, self.epoch, self.batch = step, epoch, batch


_SAVED_WITHIN_S, _LOOK_AGAIN_S = 10.0, 0.01
HIDDEN = "unisono."
"""The prefix of keys that are saved with a run and not shown to the program."""
_TRAINING, _REQUIRES_GRAD = operator.attrgetter("training"), operator.attrgetter("requires_grad")


@final
@dataclass(slots=True)
class RunState:
    """The state that a run has reached."""

    model: nn.Module  # whose values they are
    optimizer: Optimizer  # whose state it is
    takes_programs: InitVar[bool] = False  # options where a checkpoint has other ones
    position: Position = field(default_factory=Position)  # how far the run has come
    state: dict[str, Any] = field(default_factory=dict)  # what the program wants kept
    hidden: dict[str, Any] = field(default_factory=dict)  # what is kept with it, and not shown
    # the results of the last step, and what else the trainer records; plain JSON
    last: dict[str, Any] = field(default_factory=dict)
    recorded: RecordedOptions = field(init=False)  # what the program gave when the run first began
    _flags: tuple[Any, ...] = ()
    _named: dict[str, Any] = field(default_factory=dict)  # what `_flags` mean
    _before: dict[str, Any] = field(default_factory=dict)  # of the snapshot before

    def __post_init__(self, takes_programs: bool) -> None:
        self.recorded = RecordedOptions(
            self.model, self.optimizer, self.state, takes_programs=takes_programs
        )

    def has_lost_schedule(self, of_program: Iterable[Any]) -> bool:
        """Return whether a schedule of an optimizer is in neither the state nor `of_program`."""
        kept = [
            value for value in (*self.state.values(), *of_program) if isinstance(value, LRScheduler)
        ]
        return any(
            getattr(single.step, "_wrapped_by_lr_sched", False)
            and not any(not name or schedule.optimizer is single for schedule in kept)
            for name, single in optimizers_of(self.optimizer).items()
        )

    def collect(
        self, identity: Mapping[str, Any], *, with_optimizer: bool, was_left: bool = False
    ) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
        """Convert the state to plain JSON and tensors, or raise CheckpointError.

        `with_optimizer`: include the optimizer's state of parameters; else the exchange holds it.
        `was_left`: the program has left a loop early, perhaps during a validation.
        """
        packed, own = pack_state(self.state | self.hidden)
        named = named_parameters(self.model, self.optimizer) if with_optimizer else {}
        tensors, numbers = take_state(self.optimizer, named)
        facts = {
            "format": FORMAT,
            "position": asdict(self.position),
            "identity": dict(identity),
            "state": packed,
            "last": self.last,
            "given": self.recorded.first,
            "groups": group_options(self.optimizer),
            "modes": self.modes_now(was_left=was_left),
            "numbers": numbers,
        } | ({"was_left": True} if was_left else {})
        return facts, {**tensors, **own}

    def check_keepable(self) -> None:
        """Raise CheckpointError, before any training, for what cannot be saved."""
        pack_state(self.state)
        check_groups(json.loads(json.dumps(group_options(self.optimizer))), self.optimizer)
        check_keys(self.optimizer, self.state.values())
        named = named_parameters(self.model, self.optimizer)
        tensors, _ = take_state(self.optimizer, {} if is_in_pieces(self.optimizer) else named)
        for name, tensor in {**named, **dict(self.model.named_buffers()), **tensors}.items():
            check_dtype(f"`{name}`", tensor)

    def apply(self, snapshot: CheckpointData, *, lends: bool = False) -> None:
        """Set the whole state from a checkpoint, as :func:`.saved.apply` does."""
        unpacked_state(snapshot.facts["state"], snapshot.others)
        apply(snapshot, self.model, self.optimizer, lends=lends)
        self._apply_rest(snapshot.facts, snapshot.others)

    def apply_rest(self, facts: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> None:
        """Load the facts and tensors beside a snapshot that an exchange has loaded."""
        apply_groups(facts["groups"], self.optimizer, exactly=True)
        apply_modes(facts["modes"], self.model, self.optimizer)
        self._before = facts["modes"]
        self._apply_rest(facts, tensors)

    def apply_ended(self, entry: Passed, team: Team) -> None:
        """Load, on a replacement, the state that the others had at the end of a loop."""
        assert entry.loop is not None
        end = json.loads(entry.payload)
        places = Places.from_json(dict(entry.loop))
        memory = team.memory(places.key, places.num_bytes)
        number: int = end.get("snapshot", 0)
        until_s, is_there = time.monotonic() + _SAVED_WITHIN_S, False
        while not is_there and time.monotonic() < until_s:
            slot = places.newest(memory.read)
            if max(places.marks(memory.read)) < number:
                # The last one here to know that it is whole was lost before it could say so.
                slot = 0 if slot is None else 1 - slot
                memory.write(places.mark_at(slot), number.to_bytes(8, "little"))
            view = memory.view(places.slots_at[slot or 0], places.slot_bytes)
            facts = None if slot is None else read_facts(view, places.blob_at)
            is_there = facts is not None and facts["position"]["step"] >= end["position"]["step"]
            is_there &= bool(facts and facts.get("was_left")) or not end.get("was_left")
            if not is_there:  # the program has left the loop, and the leader still saves its end
                time.sleep(_LOOK_AGAIN_S)
        if not is_there:
            raise UnisonoError(
                f"the end of a loop must still be in memory for a replacement to pass it, but that "
                f"of step {end['position']['step']} is not: only the newest of many are kept, and "
                f"the leader may be lost while it keeps one."
            )
        written = files_of(view, places.blob_at)
        files = {name: Sealed.of(chunks) for name, chunks in written.items()}
        self.apply(CheckpointData.from_files(files))
        self.position.move_to(**end["position"])
        self.last = end["last"]

    def _apply_rest(self, facts: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> None:
        self.position.move_to(**facts["position"])
        self.last, self.recorded.first = facts["last"], facts["given"]
        # What is hidden comes last, as it may put the program's own objects right.
        for state, is_hidden in ((self.state, False), (self.hidden, True)):
            packed = {k: v for k, v in facts["state"].items() if k.startswith(HIDDEN) == is_hidden}
            unpack_state(packed, tensors, state)

    def modes_now(self, *, was_left: bool) -> dict[str, Any]:
        """Return, and record, which parameters are fixed and which layers are in `eval()`."""
        modules = [*self.model.modules()]
        parameters = named_parameters(self.model, self.optimizer).values()
        flags = (modules, [*map(_TRAINING, modules)], [*map(_REQUIRES_GRAD, parameters)])
        if flags != self._flags:  # to name them takes longer, and few programs change any
            self._flags, self._named = flags, modes_of(self.model, self.optimizer)
        modes = dict(self._named)
        if was_left and not self.model.training and self._before:
            # Perhaps during a validation: the next step needs the modes of the steps before.
            modes["evaluating"] = self._before["evaluating"]
        self._before = modes
        return modes
