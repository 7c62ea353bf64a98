"""One copy of the parameters for all workers of a host, in shared memory.

Each worker adds up and updates its pieces in place, and nothing has to be sent. They change between
the two barriers of a step; a worker that is lost there leaves them torn, and all workers restore
the newest snapshot.

While a loop runs, parameters' ``.data`` and optimizer state show the arena in a private view
(``private_view.py``). Between two steps, every worker makes the same changes there. They are
detected when the next step begins; each worker publishes a share of them, and all see the arena
again. Parameters that the optimizer does not update stay changed in the view, and are
published for snapshots.

Optimizers that are not element-wise cannot work on pieces: one worker of each host updates whole
parameters for all and alone has their state, where the environment asks for this exchange; else
they get replicas.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Any, final

import torch
from torch import nn
from torch.optim import Optimizer
from typing_extensions import override

from unisono.engine.exchange.between import Between
from unisono.engine.exchange.carriage import Carriage
from unisono.engine.exchange.loop_layout import LoopLayout
from unisono.engine.exchange.ownership import Ownership, PlannedState
from unisono.engine.exchange.private_view import PrivateView
from unisono.engine.exchange.shared_optimizer_state import (
    SharedOptimizerState,
    StateKeys,
    lay_down,
    plan_state,
)
from unisono.engine.state.optimizer_state import apply_state, check_keys, group_options, take_state
from unisono.engine.state.optimizers import is_elementwise
from unisono.engine.state.saved import apply_groups
from unisono.errors import CheckpointError
from unisono.runtime.workers.launcher_messages import Live


@final
class SharedCopy(Ownership):
    """One copy for all workers of a host, in its memory; each worker updates its pieces."""

    optimizer_state: SharedOptimizerState | None = None

    def __init__(self, layout: LoopLayout, carriage: Carriage, between: Between) -> None:
        super().__init__(layout, carriage, between)
        self.have_all = is_elementwise(layout.optimizer)
        self._leader = self.team.membership.leader

    @classmethod
    @override
    def plan_state(cls, optimizer: Optimizer, updated: Mapping[str, nn.Parameter]) -> PlannedState:
        if not is_elementwise(optimizer):
            return super().plan_state(optimizer, updated)
        return plan_state(optimizer, updated)

    @property
    @override
    def is_lost(self) -> bool:
        return not self.have_all and self.team.membership.leader != self._leader

    @override
    def trust(self) -> None:
        self._leader = self.team.membership.leader

    @override
    def bind(self, keys: StateKeys, live: Live | None) -> None:
        arena = self.memory.arena
        self._view = PrivateView(arena.memory, [arena.parameters, arena.states])
        self._fixed_view = PrivateView(arena.memory, [arena.fixed])
        if self.have_all:
            self.optimizer_state = SharedOptimizerState(arena, keys, self._view.regions[1])
        self._places = [*arena.parameters.tensors(), *arena.fixed.tensors()]
        if live is None:
            self._begin()
            self._look(copy_of_buffers=0)
            return
        if live.is_alone:
            self._put_back()
        self._look(copy_of_buffers=self.memory.copy_of_buffers)
        self.layout.optimizer.state.clear()
        self._load_optimizer()

    @override
    def load(self) -> None:
        self._put_back()
        self.discard_changes()

    @override
    def discard_changes(self) -> None:
        self._look(copy_of_buffers=self.memory.copy_of_buffers)
        for parameter in self.layout.parameters:
            self.layout.optimizer.state.pop(parameter, None)
        if self.optimizer_state is not None:
            self.optimizer_state.forget()
        self._load_optimizer()

    @override
    def copy(self, slot: int, copy_of_buffers: int, position: int, size: int) -> None:
        self.memory.snapshots.copy(slot, copy_of_buffers, position, size, into_slot=True)

    @override
    def plan(self) -> None:
        self.carriage.plan(everywhere=False)

    @override
    def all_sums(self, purpose: str) -> bool:
        return self.team.meet(purpose)

    @override
    def are_read(self, purpose: str) -> bool:
        return self.team.meet(purpose)

    @override
    def share(self, purpose: str) -> bool:
        return self.team.meet(purpose)

    @override
    def publish_changes(self, *, alone: bool) -> None:
        layout = self.layout
        if self.optimizer_state is not None:
            state = layout.optimizer.state
            self.is_state_new |= self.optimizer_state.take_replaced(state, layout.parameters)
            if self.optimizer_state.changed:
                if not alone:
                    self.team.meet("change of state")  # all have read what was known
                for index, has in self.optimizer_state.changed.items():
                    self.optimizer_state.known[index] = has
                self.optimizer_state.changed.clear()
        changed = self._view.publish_changes(self.team, alone=alone)
        self._view.forget(changed)
        if changed and self.optimizer_state is not None:
            self.is_state_new |= changed[-1][1] > self._view.starts[1]

    @override
    def publish_before_save(self, *, alone: bool) -> None:
        self.layout.take_replaced()
        self.publish_changes(alone=alone)
        self._fixed_view.publish_changes(self.team, alone=alone)

    @override
    def changed_name(self) -> str:
        changed = self._view.changed()
        name = next(self._view.names(changed), "")
        if changed and not name:
            # Written to, with what was there: the page must not hide the update to come.
            self._view.forget(changed)
            self.is_written_in_passes = True
        return name

    @contextmanager
    @override
    def updating(self) -> Iterator[None]:
        """Point the model's parameters at the arena while an optimizer updates them."""
        pairs = [*zip(self.layout.parameters, self._places, strict=False)]
        for parameter, there in pairs:
            parameter.data = there
        try:
            yield
        finally:
            for (parameter, there), place in zip(pairs, self.layout.bound, strict=False):
                if parameter.data_ptr() != there.data_ptr():
                    there.copy_(parameter.data)  # the optimizer has replaced it
                parameter.data = place
            # Code around the optimizer's step may have changed others, here alone.
            changed = self._fixed_view.publish_changes(self.team, alone=True)
            buffers = self.layout.buffers
            if changed and buffers.moving is not None:
                buffers.moving.flags(1 - buffers.now)[-1] = 1

    @override
    def load_fixed(self) -> None:
        buffers = self.layout.buffers
        if buffers.moving is not None and buffers.moving.flags(1 - buffers.now)[-1]:
            self._fixed_view.forget_all()
            buffers.moving.drop()

    @override
    def fixed_values(self) -> Sequence[torch.Tensor]:
        layout = self.layout
        suspects, places = set(self.fixed_suspects()), self._places[len(layout.parameters) :]
        each = enumerate(zip(layout.fixed.values(), places, strict=True))
        return [p.detach().clone() if n in suspects else there for n, (p, there) in each]

    @override
    def fixed_suspects(self) -> Sequence[int]:
        places = self._fixed_view.places(self._fixed_view.changed())
        return [n for n, name in enumerate(self.layout.fixed) if name in places]

    @override
    def hand_out(self) -> None:
        if not self.have_all:
            self._take_optimizer(*self.memory.newest())

    @override
    def hand_round(self) -> None:
        """Distribute one worker's state to all, unless that state cannot be described."""
        team = self.team
        if self.have_all or team.size == 1:
            return
        said = team.gather_from_host_leaders(self._describe_optimizer, "end of a loop")
        if said[team.host] and not team.leads_host:
            snapshots = self.memory.snapshots
            self._take_optimizer(snapshots.facts(0), snapshots.extra(0))

    @override
    def leave(self) -> None:
        layout = self.layout
        # Without other workers, keep no second copy in the arena, unless it is small.
        releases = self.team.size == 1 and not self.memory.arena.is_kept_between_loops
        take = self._view.make_private if releases else torch.clone
        for parameter in layout.all:
            parameter.data = take(parameter.data)
        for parameter in layout.parameters:
            state = layout.optimizer.state.get(parameter, {})
            for name, value in state.items():
                if isinstance(value, torch.Tensor):
                    state[name] = take(value)

    def _begin(self) -> None:
        """Copy the leader's values into the arena of every host."""
        team, layout, arena = self.team, self.layout, self.memory.arena
        while True:
            leader = team.membership.leader
            if team.is_leader:
                with torch.no_grad():
                    shared = self.optimizer_state
                    for index, parameter in enumerate(layout.parameters):
                        arena.parameters.put(index, parameter)
                    for index, parameter in enumerate(layout.fixed.values()):
                        arena.fixed.put(index, parameter)
                    if shared is not None:
                        shared.known[:] = lay_down(
                            layout.optimizer.state, layout.parameters, shared.keys, arena.states
                        )
                layout.buffers.give()
            team.meet("sharing parameters")
            if team.membership.leader == leader:
                break
        spans = arena.state_spans(0)
        self.between.share(
            lambda: [arena.memory.view(start, stop - start) for start, stop in spans]
        )

    def _look(self, *, copy_of_buffers: int) -> None:
        """Point the model's tensors at the arena, and discard changes of the program."""
        views = (self._view, self._fixed_view)
        for view in views:
            view.forget_all()
        shown = chain.from_iterable(view.regions[0].tensors() for view in views)
        for place, parameter in zip(shown, self.layout.all, strict=True):
            parameter.data = place
        self.layout.buffers.load(copy_of_buffers)

    def _put_back(self) -> None:
        memory, is_back = self.memory, False
        while not is_back:  # each worker copies a share, which one that is lost does not
            self.carriage.forget_step()
            slot, copy_of_buffers = memory.newest_slot, memory.copy_of_buffers
            position, size = self.layout.share
            memory.snapshots.copy(slot, copy_of_buffers, position, size, into_slot=False)
            is_back = self.team.meet("putting back")

    def _load_optimizer(self) -> None:
        """Load the optimizer state that is not in the arena from the newest snapshot."""
        if self.have_all or self.team.leads_host:
            apply_state(self.layout.optimizer, self.named_whole(), *self.memory.newest())

    def _describe_optimizer(self) -> bytes:
        """Write this worker's optimizer state to shared memory, if it can be described."""
        optimizer = self.layout.optimizer
        try:
            check_keys(optimizer)
            tensors, numbers = take_state(optimizer, self.named_whole())
            self.describe(0, {"numbers": numbers, "groups": group_options(optimizer)}, tensors)
        except (CheckpointError, ValueError):
            return b""
        return b"described"

    def _take_optimizer(
        self, facts: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]
    ) -> None:
        apply_state(self.layout.optimizer, self.named_whole(), facts, tensors)
        # Its step may have changed options.
        apply_groups(facts["groups"], self.layout.optimizer, exactly=True)
