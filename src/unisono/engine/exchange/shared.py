"""An exchange for workers of one host: one copy of the parameters, in shared memory.

Each worker adds up and updates its pieces where they lie, and nothing has to be sent. They change
between the two meetings of a step; a worker that is lost there leaves them torn, and the newest
snapshot is put back.

While a loop runs, parameters' ``.data`` and optimizer state show the arena in a private view
(``private_view.py``). What the program changes there between two steps it has changed on every
worker alike. It is found when the next step begins; each worker publishes a share of it, and all
see the arena again. Parameters that the optimizer does not update stay changed in the view, and are
published for snapshots.

Optimizers that are not element-wise cannot work on pieces: the leader updates whole parameters for
all and alone has their state, where the environment asks for this exchange; else they get replicas.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain

import torch
from torch import nn

from unisono.engine.exchange.parts import OrderedSum
from unisono.engine.exchange.private_view import PrivateView
from unisono.engine.exchange.protocol import Exchange
from unisono.engine.exchange.shared_optimizer_state import (
    SharedOptimizerState,
    StateKeys,
    lay_down,
    plan_state,
)
from unisono.engine.state.optimizer_state import apply_state
from unisono.engine.state.optimizers import is_elementwise
from unisono.runtime.workers.launcher_messages import Live


class SharedExchange(Exchange):
    """An exchange through memory that all see. Final; arguments as of :class:`Exchange`."""

    optimizer_state: SharedOptimizerState | None = None

    def take_changes(self, *, alone: bool = False) -> None:
        """See :class:`Exchange`."""
        super().take_changes()
        if self.optimizer_state is not None:
            state = self._optimizer.state
            self.is_state_new |= self.optimizer_state.take_replaced(state, self.parameters)
            if self.optimizer_state.changed:
                if not alone:
                    self._team.meet("change of state")  # all have read what was known
                for index, has in self.optimizer_state.changed.items():
                    self.optimizer_state.known[index] = has
                self.optimizer_state.changed.clear()
        changed = self._view.publish_changes(self._team, alone=alone)
        self._view.forget(changed)
        if changed and self.optimizer_state is not None:
            self.is_state_new |= changed[-1][1] > self._view.starts[1]

    def changed_name(self) -> str:
        """See :class:`Exchange`; by whatever way."""
        changed = self._view.changed()
        name = next(self._view.names(changed), "")
        if changed and not name:
            # Written to, with what was there: the page must not hide the update to come.
            self._view.forget(changed)
            self.is_written_in_passes = True
        return name

    def give_changes(self, *, alone: bool = False) -> None:
        """See :class:`Exchange`."""
        self.take_changes(alone=alone)
        self._fixed_view.publish_changes(self._team, alone=alone)
        super().give_changes(alone=alone)

    def _fixed_values(self) -> Sequence[torch.Tensor]:
        suspects, places = set(self._fixed_suspects()), self._places[len(self.parameters) :]
        each = enumerate(zip(self.fixed, places, strict=True))
        return [p.detach().clone() if n in suspects else there for n, (p, there) in each]

    def _fixed_suspects(self) -> Sequence[int]:
        places = self._fixed_view.places(self._fixed_view.changed())
        return [n for n, name in enumerate(self._names[len(self.parameters) :]) if name in places]

    def take_fixed(self) -> None:
        """See :class:`Exchange`."""
        moving = self.buffers.moving
        if moving is not None and moving.flags(1 - self.buffers.now)[-1]:
            self._fixed_view.forget_all()
            moving.drop()

    @contextmanager
    def updating(self) -> Iterator[None]:
        """See :class:`Exchange`; parameters are those of the arena, not what the program sees."""
        pairs = [*zip(self.parameters, self._places, strict=False)]
        for parameter, there in pairs:
            parameter.data = there
        try:
            yield
        finally:
            for (parameter, there), place in zip(pairs, self._bound, strict=False):
                if parameter.data_ptr() != there.data_ptr():
                    there.copy_(parameter.data)  # the optimizer has replaced it
                parameter.data = place
            # Code around the optimizer's step may have changed others, here alone.
            changed = self._fixed_view.publish_changes(self._team, alone=True)
            if changed and self.buffers.moving is not None:
                self.buffers.moving.flags(1 - self.buffers.now)[-1] = 1

    def unbind(self) -> None:
        """See :class:`Exchange`."""
        # Where nobody else looks at the arena, nothing is there twice.
        take = self._view.take_out if self._team.size == 1 else torch.clone
        for parameter in self._all:
            parameter.data = take(parameter.data)
        for parameter in self.parameters:
            state = self._optimizer.state.get(parameter, {})
            for name, value in state.items():
                if isinstance(value, torch.Tensor):
                    state[name] = take(value)
        super().unbind()

    def _plan_state(
        self, parameters: Mapping[str, nn.Parameter]
    ) -> tuple[StateKeys, dict[str, torch.Tensor]]:
        self.have_all = is_elementwise(self._optimizer)
        if self.have_all:
            return plan_state(self._optimizer, parameters)
        return super()._plan_state(parameters)

    def _bind(self, keys: StateKeys, live: Live | None) -> None:
        arena = self.memory.arena
        self._view = PrivateView(arena.memory, [arena.parameters, arena.states])
        self._fixed_view = PrivateView(arena.memory, [arena.fixed])
        if self.have_all:
            self.optimizer_state = SharedOptimizerState(arena, keys, self._view.regions[1])
        self._places = [*arena.parameters.tensors(), *arena.fixed.tensors()]
        self.whole = arena.gradients[0].tensors()
        if live is None:
            self._begin()
        else:
            self._join(is_alone=live.is_alone)

    def _plan_sum(self) -> None:
        pieces = self._cut(self._team.size)[self._team.position]
        self._sum = OrderedSum(self._parts.published(self.division.parts), pieces)
        self.pieces, self.totals = self._sum.pieces, self._sum.totals

    def _begin(self) -> None:
        """Put the leader's values into the arena and let every worker's model look at them."""
        team = self._team
        while True:
            leader = team.membership.leader
            if team.is_leader:
                with torch.no_grad():
                    arena, shared = self.memory.arena, self.optimizer_state
                    for index, parameter in enumerate(self.parameters):
                        arena.parameters.put(index, parameter)
                    for index, parameter in enumerate(self.fixed):
                        arena.fixed.put(index, parameter)
                    if shared is not None:
                        shared.known[:] = lay_down(
                            self._optimizer.state, self.parameters, shared.keys, arena.states
                        )
                self.buffers.give()
            team.meet("sharing parameters")
            if team.membership.leader == leader:
                break
        self._bring_to_hosts()
        self._look(copy_of_buffers=0)

    def _bring_to_hosts(self) -> None:
        """Bring the leader's values to the arenas of other hosts; here there are none."""

    def _join(self, *, is_alone: bool) -> None:
        """Look at the arena that the others use, or have used."""
        if is_alone:
            self._put_back()
        self._look(copy_of_buffers=self.memory.copy_of_buffers)
        self._optimizer.state.clear()
        self._load_optimizer()

    def _look(self, *, copy_of_buffers: int) -> None:
        views = (self._view, self._fixed_view)
        for view in views:
            view.forget_all()
        shown = chain.from_iterable(view.regions[0].tensors() for view in views)
        for place, parameter in zip(shown, self._all, strict=True):
            parameter.data = place
        self.buffers.load(copy_of_buffers)

    def _load(self) -> None:
        self._put_back()
        self._look(copy_of_buffers=self.memory.copy_of_buffers)
        for parameter in self.parameters:
            self._optimizer.state.pop(parameter, None)
        if self.optimizer_state is not None:
            self.optimizer_state.forget()
        self._load_optimizer()

    def _put_back(self) -> None:
        """Copy the newest snapshot over the arena, each worker its share."""
        team, memory = self._team, self.memory
        slot, copy_of_buffers = memory.newest_slot, memory.copy_of_buffers
        while True:
            self._copy(slot, copy_of_buffers, team.position, team.size, into_slot=False)
            if team.meet("putting back"):
                return

    def _copy(
        self, slot: int, copy_of_buffers: int, position: int, size: int, *, into_slot: bool
    ) -> None:
        snapshots = self.memory.snapshots
        snapshots.copy(slot, copy_of_buffers, position, size, into_slot=into_slot)

    def _load_optimizer(self) -> None:
        """Take what is not in the arena of the optimizer's state from the newest snapshot."""
        if self.acts:
            apply_state(self._optimizer, self._named_whole(), *self.memory.newest())
