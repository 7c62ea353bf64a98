"""The state that all workers share while a loop is under way: how a model comes to look at it.

Three ways in: the lead's values are shared (a loop begins), the others' are joined, or a snapshot
is put back (nobody was left, or somebody was lost in the midst of an update). One way out: every
worker gets tensors of its own again.

Invariant: while it is bound, nobody but the optimizer writes to parameters; that is checked.
"""

from __future__ import annotations

import json
import operator
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from unisono.checkpoint.contents import STATE_PREFIX, check_groups, put_back_groups
from unisono.comm.host import Live
from unisono.comm.team import Team
from unisono.engine.arena import Arena, Plan, lay_out, size_of
from unisono.engine.buffers import Buffers, named_buffers
from unisono.engine.contents import named_parameters, updated_parameters
from unisono.engine.kept import check_told, group_options, join_state, put_back_state, take_state
from unisono.engine.manifest import Manifest
from unisono.engine.modes import modes_of
from unisono.engine.optimizers import is_elementwise, is_surrounded, state_like
from unisono.engine.packing import check_dtype
from unisono.engine.placeholders import Placeholders
from unisono.engine.snapshots import Snapshots, strides_of
from unisono.engine.structure import Structure
from unisono.engine.update import StateKey
from unisono.errors import CheckpointError

# Beside the state, a snapshot has room for this much and some times the parameters: optimizers that
# are not element-wise keep their state there, and programs averages of weights. Pages that are not
# written do not exist.
_BLOB_BYTES = 1 << 26
_BLOB_TIMES_PARAMETERS = 8
_VERSION = operator.attrgetter("_version")
_TRAINING, _REQUIRES_GRAD = operator.attrgetter("training"), operator.attrgetter("requires_grad")


class SharedState:
    """Parameters, buffers and optimizer state of one run in an arena. Final.

    Args:
        model: shared by all workers while bound.
        optimizer: the user's.
        shards: S.
        team: the workers.
        key: names the memory, where a new one is needed.
        arena: of an earlier loop of the same run, used again where its plan still holds.
        live: how this worker joins a loop that the others are in; None: it begins with them.

    Attributes:
        arena: where everything lies.
        parameters: those that the optimizer updates, in the arena's order.
        fixed: those that it does not.
        placeholders: what stands for gradients that have been taken.
        buffers: the model's.
        structure: what the model must go on to consist of.
        keys: for each of `parameters`, its optimizer state's names and where they lie.
        is_sliced: whether the optimizer works on pieces, with its state in the arena; else the lead
            alone has that state, and snapshots have it.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        *,
        shards: int,
        team: Team,
        key: int,
        arena: Arena | None,
        live: Live | None,
    ) -> None:
        self._model, self._optimizer, self._team = model, optimizer, team
        named = updated_parameters(model, optimizer)
        self.parameters = list(named.values())
        self.placeholders = Placeholders(named)
        updated = set(map(id, self.parameters))
        self.fixed = [p for p in model.parameters() if id(p) not in updated]
        self._all = [*self.parameters, *self.fixed]
        self._flags: tuple[Any, ...] = ()
        self.buffers = Buffers(model)
        self.structure = Structure(model)
        self.is_sliced = is_elementwise(optimizer)
        self.keys, examples = self._plan_state()
        plan = self._plan(examples, shards)
        is_joining = live is not None and live.loop is not None
        if live is not None and live.loop is not None:
            key, arena = live.loop["key"], None
        elif not self._have_all(arena):
            arena = None
        if arena is None or arena.plan != plan:
            arena = Arena(team.memory(key, Arena.num_bytes(plan)), plan, key)
        self.arena = arena
        self.snapshots = Snapshots(arena)
        self._manifest = Manifest(model, optimizer, arena, self.keys)
        self._homes = [*arena.parameters.tensors(), *arena.fixed.tensors()]
        self.buffers.bind(arena)
        if is_joining:
            self._join(is_alone=live is not None and live.is_alone)
        else:
            self._share()
        self.trust_lead()

    @property
    def is_lost(self) -> bool:
        """Whether the optimizer's state was lost with the lead, and only snapshots have it."""
        return not self.is_sliced and self._team.crew.lead != self._lead

    def trust_lead(self) -> None:
        """Take the lead's optimizer state for that of the run."""
        self._lead = self._team.crew.lead

    def clear_gradients(self) -> None:
        """Have the next backward pass allocate every gradient."""
        for parameter in self._all:
            parameter.grad = None

    def remember(self) -> None:
        """Note the parameters' versions, which every change in place increments."""
        self._versions = list(map(_VERSION, self._all))
        self._num_groups = len(self._optimizer.param_groups)

    def check_untouched(self) -> None:
        """Refuse to go on after others than the optimizer have changed what all workers share."""
        if list(map(_VERSION, self._all)) != self._versions or (
            list(map(torch.Tensor.data_ptr, self._all)) != self._places
        ):
            raise RuntimeError(
                "parameters are shared by all workers while a loop over steps is under way and "
                "must be changed by the optimizer alone, but something else changed them in place "
                "or replaced their memory: do it between two loops."
            )
        if len(self._optimizer.param_groups) != self._num_groups:
            raise RuntimeError(
                f"an optimizer must keep its parameter groups while a loop is under way, but has "
                f"{len(self._optimizer.param_groups)} instead of {self._num_groups}: add groups "
                f"between two loops."
            )

    def check_update(self) -> None:
        """Refuse to update pieces with an optimizer that somebody has put code around meanwhile."""
        if self.is_sliced and is_surrounded(self._optimizer):
            raise RuntimeError(
                "hooks of an optimizer's `step`, and what is put around it, must be there before "
                "a loop begins, but came under way: register or wrap before, or between two loops."
            )

    def copy(
        self, facts: Mapping[str, Any], extras: Mapping[str, torch.Tensor], *, alone: bool = False
    ) -> int:
        """Copy this worker's share of the state into a snapshot, which the lead describes.

        Args:
            facts: what is to be known beside it, plain JSON.
            extras: what is to be kept beside it.
            alone: copy all of it.

        Returns:
            The slot; it is whole once everybody has done so.
        """
        team = self._team
        position, size = (0, 1) if alone else (team.position, team.size)
        slot = self.snapshots.copy(self.buffers.now, position, size)
        if team.is_lead:
            self._describe(slot, facts, extras, was_left=alone)
        return slot

    def _describe(
        self,
        slot: int,
        facts: Mapping[str, Any],
        extras: Mapping[str, torch.Tensor],
        *,
        was_left: bool = False,
    ) -> None:
        kept, rest = take_state(self._optimizer, self._named_whole())
        kept.update(extras)
        more = {
            "copy of buffers": self.buffers.now,
            "groups": group_options(self._optimizer),
            "modes": self._modes(was_left=was_left),
            "numbers": rest,
            "strides": strides_of(kept),
        }
        tensors = self._manifest.tensors(self.arena.whose, kept)
        self.snapshots.describe(slot, {**facts, **more}, tensors, list(kept.values()))

    def hand_round(self) -> None:
        """Give everybody the state of an optimizer that the lead alone has stepped. Collective.

        Where no snapshot has been taken at the end of a loop. State that no snapshot can keep stays
        the lead's.
        """
        if self.is_sliced or self._team.size == 1:
            return

        def speak() -> bytes:
            try:
                self.check_keepable()
                self._describe(0, {}, {})
            except (CheckpointError, ValueError):
                return b""
            return b"described"

        is_there = self._team.hear_lead(speak, "end of a loop")
        if is_there and not self._team.is_lead:
            self._load_optimizer(self.snapshots.facts(0), self.snapshots.extra(0), groups=True)

    def check_keepable(self) -> None:
        """Refuse, before any training, what snapshots cannot keep.

        Raises:
            CheckpointError: the optimizer keeps something that is neither tensor nor plain value,
                or elsewhere than in its `state`; or a tensor is of a dtype that no file can hold.
        """
        check_groups(json.loads(json.dumps(group_options(self._optimizer))), self._optimizer)
        check_told(self._optimizer)
        named = named_parameters(self._model, self._optimizer)
        tensors, _ = take_state(self._optimizer, named)
        for name, tensor in {**named, **named_buffers(self._model), **tensors}.items():
            check_dtype(f"`{name}`", tensor)

    def newest(self) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
        """Read what is kept beside the newest snapshot: facts and extras."""
        slot = self._newest()
        return self.snapshots.facts(slot), self.snapshots.extra(slot)

    def put_back(self) -> None:
        """Make the newest snapshot the present state. Collective."""
        self._put_back()
        self.buffers.load(self._copy_of_buffers())
        for parameter in self.parameters:
            self._optimizer.state.pop(parameter, None)
        self.load_optimizer()
        self.trust_lead()
        self.remember()

    def load_optimizer(self, *, everywhere: bool = False) -> None:
        """Take what is not in the arena of an optimizer's state from the newest snapshot.

        Args:
            everywhere: that of one which is not element-wise, on every worker; else the lead alone
                has use for it.
        """
        is_wanted = not everywhere if self.is_sliced else everywhere or self._team.is_lead
        if is_wanted:
            self._load_optimizer(*self.newest(), groups=everywhere)

    def _load_optimizer(
        self, facts: Mapping[str, Any], extras: Mapping[str, torch.Tensor], *, groups: bool
    ) -> None:
        tensors = {
            label: tensor for label, tensor in extras.items() if not label.startswith(STATE_PREFIX)
        }
        states = join_state(tensors, facts["numbers"])
        put_back_state(self._optimizer, self._named_whole(), states)
        if groups:
            put_back_groups(facts["groups"], self._optimizer)  # its step may change options

    def unbind(self) -> None:
        """Give this worker's model tensors of its own again; values stay those of the last step."""
        for parameter in self._all:
            parameter.data = parameter.data.clone()
            parameter.grad = None
        for parameter in self.parameters:
            state = self._optimizer.state.get(parameter, {})
            for name, value in state.items():
                if isinstance(value, torch.Tensor):
                    state[name] = value.clone()
        self.buffers.unbind()

    def _plan(self, examples: Sequence[torch.Tensor], shards: int) -> Plan:
        slots, fixed = tuple(lay_out(self.parameters)), tuple(lay_out(self.fixed))
        return Plan(
            slots,
            fixed,
            tuple(lay_out(examples)),
            self.buffers.slots,
            shards,
            _BLOB_BYTES + _BLOB_TIMES_PARAMETERS * (size_of(slots) + size_of(fixed)),
        )

    def _have_all(self, arena: Arena | None) -> bool:
        """Tell whether every worker has this arena: a replacement may have missed its loop."""
        mine = b"none" if arena is None else str(arena.key).encode()
        return len(set(self._team.gather(mine, "choice of memory").values())) == 1

    def _plan_state(self) -> tuple[list[dict[str, StateKey]], list[torch.Tensor]]:
        """List the optimizer state of every parameter, and an example of each tensor."""
        keys: list[dict[str, StateKey]] = [{} for _ in self.parameters]
        examples: list[torch.Tensor] = []
        if not self.is_sliced:
            return keys, examples
        index_of = {id(parameter): index for index, parameter in enumerate(self.parameters)}
        for group in self._optimizer.param_groups:
            state_of = {
                dtype: state_like(self._optimizer, group, dtype)
                for dtype in {parameter.dtype for parameter in group["params"]}
            }
            for parameter in group["params"]:
                for name, example in sorted(state_of[parameter.dtype].items()):
                    is_array = example.numel() == 4
                    keys[index_of[id(parameter)]][name] = StateKey(len(examples), is_array)
                    like = torch.empty_like(parameter, dtype=example.dtype, device="meta")
                    examples.append(like if is_array else example.reshape(()))
        return keys, examples

    def _share(self) -> None:
        """Put the lead's values into the arena and let every worker's model look at them."""
        team = self._team
        while True:
            lead = team.crew.lead
            if team.is_lead:
                with torch.no_grad():
                    for home, parameter in zip(self._homes, self._all, strict=True):
                        home.copy_(parameter)
                    self._share_optimizer()
                self.buffers.give()
            team.meet("sharing parameters")
            if team.crew.lead == lead:
                break
        self._look(copy_of_buffers=0)

    def _join(self, *, is_alone: bool) -> None:
        """Look at the arena that the others use, or have used."""
        if is_alone:
            self._put_back()
        self._look(copy_of_buffers=self._copy_of_buffers())
        self._optimizer.state.clear()
        self.load_optimizer()

    def _look(self, *, copy_of_buffers: int) -> None:
        for home, parameter in zip(self._homes, self._all, strict=True):
            parameter.data = home
        self.buffers.load(copy_of_buffers)
        self._places = list(map(torch.Tensor.data_ptr, self._all))
        self.remember()

    def _put_back(self) -> None:
        """Copy the newest snapshot over the arena, each worker its share."""
        team, slot, copy_of_buffers = self._team, self._newest(), self._copy_of_buffers()
        while True:
            self.snapshots.put_back(slot, copy_of_buffers, team.position, team.size)
            if team.meet("putting back"):
                return

    def _newest(self) -> int:
        slot = self.snapshots.newest
        assert slot is not None, "a loop begins with a snapshot"
        return slot

    def _named_whole(self) -> dict[str, nn.Parameter]:
        """Name the parameters whose optimizer state is not in the arena."""
        return {} if self.is_sliced else named_parameters(self._model, self._optimizer)

    def _modes(self, *, was_left: bool) -> dict[str, Any]:
        modules = self.structure.modules
        flags = (modules, [*map(_TRAINING, modules)], [*map(_REQUIRES_GRAD, self._all)])
        if flags != self._flags:  # to name them takes much longer, and few programs change any
            self._flags, self._named_modes = flags, modes_of(self._model, self._optimizer)
        modes = dict(self._named_modes)
        if was_left and not self._model.training and self.snapshots.newest is not None:
            # In the midst of a validation, say: steps are taken as they were before.
            modes["evaluating"] = self.newest()[0]["modes"]["evaluating"]
        return modes

    def _copy_of_buffers(self) -> int:
        return int(self.snapshots.facts(self._newest())["copy of buffers"])

    def _share_optimizer(self) -> None:
        flags = bytearray(len(self.parameters))
        for index, parameter in enumerate(self.parameters):
            state = self._optimizer.state.get(parameter, {})
            there = {name for name in self.keys[index] if state.get(name) is not None}
            if there and there != self.keys[index].keys():
                raise ValueError(
                    f"an optimizer's state must fit its options, but for these it keeps "
                    f"{sorted(self.keys[index])} and has {sorted(there)}: clear `optimizer.state` "
                    f"after such a change, or leave the options."
                )
            if there:
                flags[index] = 1
                for name, key in self.keys[index].items():
                    self.arena.states.tensor(key.at).copy_(state[name])
        self.arena.whose = bytes(flags)
