"""What is kept with a run beside its tensors, taken apart and put back: for snapshots of all kinds.

A snapshot in shared memory and a checkpoint on the disk say the same; whoever goes on from one (a
replacement, a run that goes back, a run that starts again) takes its position, the options of its
optimizer, and what the program wants kept.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import InitVar, dataclass, field
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from unisono.checkpoint.contents import (
    FORMAT,
    STATE_PREFIX,
    Snapshot,
    put_back,
    put_back_groups,
)
from unisono.checkpoint.places import Places
from unisono.checkpoint.slots import files_of, read_facts
from unisono.comm.host import Passed
from unisono.comm.team import Team
from unisono.engine.modes import put_back_modes
from unisono.engine.state import SharedState
from unisono.errors import UnisonoError
from unisono.train.given import Given
from unisono.train.position import Position
from unisono.train.state import pack, unpack, unpacked


@dataclass(slots=True)
class Kept:
    """The part of a run that is no tensor of its model.

    Attributes:
        model, optimizer: whose options and values are put back.
        position: how far the run has come.
        state: what the program wants kept.
        last: what the last step said, and what else the trainer notes; plain JSON.
        given: what the program gave when the run first began.
    """

    model: nn.Module
    optimizer: Optimizer
    resume_options: InitVar[str] = "checkpoint"
    position: Position = field(default_factory=Position)
    state: dict[str, Any] = field(default_factory=dict)
    last: dict[str, Any] = field(default_factory=dict)
    given: Given = field(init=False)

    def __post_init__(self, resume_options: str) -> None:
        self.given = Given(self.model, self.optimizer, self.state, resume_options)

    @property
    def has_lost_schedule(self) -> bool:
        """Whether a schedule steps with the optimizer that is not among what is kept."""
        has_one = getattr(self.optimizer.step, "_wrapped_by_lr_sched", False)
        return has_one and not any(isinstance(value, LRScheduler) for value in self.state.values())

    def take(self, identity: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
        """Take it apart into plain JSON and tensors; `identity` is the run's.

        Raises:
            CheckpointError: something in `state` cannot be kept.
        """
        packed, tensors = pack(self.state)
        facts = {
            "format": FORMAT,
            "position": self.position.as_json(),
            "identity": dict(identity),
            "state": packed,
            "last": self.last,
            "given": self.given.first,
        }
        return facts, tensors

    def put_back_newest(self, shared: SharedState) -> None:
        """Take over what is beside the newest snapshot of a loop under way."""
        facts, extras = shared.newest()
        self.position.move_to(**facts["position"])
        self.last, self.given.first = facts["last"], facts["given"]
        put_back_groups(facts["groups"], self.optimizer)
        put_back_modes(facts["modes"], self.model, self.optimizer)
        unpack(facts["state"], extras, self.state)

    def put_back(self, snapshot: Snapshot) -> None:
        """Take over a checkpoint, tensors and all.

        Raises:
            CheckpointError: it does not fit model and optimizer; nothing has changed then.
        """
        tensors = {STATE_PREFIX + key: tensor for key, tensor in snapshot.state_tensors.items()}
        unpacked(snapshot.facts["state"], tensors)
        put_back(snapshot, self.model, self.optimizer)
        self.position.move_to(**snapshot.facts["position"])
        self.last, self.given.first = snapshot.facts["last"], snapshot.facts["given"]
        unpack(snapshot.facts["state"], tensors, self.state)

    def put_back_ended(self, entry: Passed, team: Team) -> None:
        """Be, as a replacement, where the others were at the end of a loop."""
        assert entry.loop is not None
        end = json.loads(entry.payload)
        places = Places.from_json(entry.loop)
        memory = team.memory(places.key, places.num_bytes)
        slot = places.newest(memory.read)
        if slot is None:
            raise UnisonoError(
                f"the end of a loop must still be in memory for a replacement to pass it, but that "
                f"of step {end['position']['step']} is not: only the newest of many are kept."
            )
        view = memory.view(places.slots_at[slot], places.slot_bytes)
        kept_step = read_facts(view, places.blob_at)["position"]["step"]
        if kept_step < end["position"]["step"]:
            raise UnisonoError(
                f"the end of a loop must be in memory for a replacement to pass it, but of step "
                f"{end['position']['step']} only step {kept_step} is: the lead was lost while it "
                f"kept what the loop had led to."
            )
        files = {name: b"".join(chunks) for name, chunks in files_of(view, places.blob_at).items()}
        self.put_back(Snapshot.from_files(files))
        self.position.move_to(**end["position"])
        self.last = end["last"]
