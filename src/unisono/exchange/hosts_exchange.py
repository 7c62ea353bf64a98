"""An exchange for workers of several hosts, each host with one copy of the parameters.

Inside a host all is as in ``shared.py``. Worker i of every host adds up its slice together with
worker i of the others (``host_crossing.py``), and updates it: so do all hosts, with the same bits.
"""

from __future__ import annotations

import torch

from unisono.exchange.arena import Region, size_of
from unisono.exchange.early_part import EarlyPart
from unisono.exchange.homes import StateKeys
from unisono.exchange.host_crossing import HostCrossing
from unisono.exchange.parts import Gradients
from unisono.exchange.shared import SharedExchange
from unisono.plan.summation import Node
from unisono.workers.launcher_messages import Live
from unisono.workers.memory import Memory


class HostsExchange(SharedExchange):
    """An exchange between hosts. Final; arguments as of :class:`Exchange`."""

    takes_early = True

    @property
    def is_lost(self) -> bool:
        """See :class:`Exchange`; whoever was lost, all go back."""
        return self._crossing.is_broken

    def trust_leader(self) -> None:
        """See :class:`Exchange`."""
        super().trust_leader()
        self._crossing.trust()

    @property
    def acts(self) -> bool:
        """See :class:`Exchange`; where one worker updates for all, one of each host does."""
        return self.have_all or self._team.leads_host

    def publish_early(self, part: Node, index: int, gradient: torch.Tensor) -> None:
        """See :class:`Exchange`."""
        self._crossing.begin()
        self._early.put(part, index, gradient)
        self._crossing.ready.mark(index)

    def publish(self, part: Node, gradients: Gradients) -> None:
        """See :class:`Exchange`."""
        if self._early.has_begun:
            self._crossing.ready.mark_changed(self._early.complete(part, gradients))
        else:
            super().publish(part, gradients)

    def gather(self, purpose: str) -> list[Node] | None:
        """See :class:`Exchange`; afterwards this host knows what all shards have to say."""
        self._crossing.gather(purpose)
        return None

    def add_up(self, purpose: str) -> tuple[bool, ...]:
        """See :class:`Exchange`."""
        return self._crossing.finish()

    def all_sums(self, purpose: str) -> bool:
        """See :class:`Exchange`."""
        everywhere = self.memory.arena.gradients[0].pieces(self.pieces)
        for place, total in zip(everywhere, self.totals, strict=True):
            place.copy_(total)
        return super().all_sums(purpose)

    def hand_round(self) -> None:
        """See :class:`Exchange`; one worker of each host has the state."""
        if self.have_all:
            return
        team = self._team
        said = self._describe_optimizer() if team.leads_host else b""
        heard = team.gather(said, "end of a loop")
        if heard[team.neighbours[0]] and not team.leads_host:
            self._take_described()

    def unbind(self) -> None:
        """See :class:`Exchange`."""
        self._crossing.leave()
        super().unbind()

    def _bind(self, keys: StateKeys, live: Live | None) -> None:
        self._early = EarlyPart(self._parts)
        self._crossing = HostCrossing(self._team, self.memory, self.buffers)
        super()._bind(keys, live)

    def _bring_to_hosts(self) -> None:
        """Connect the lanes, and bring the first host's state to the others."""
        arena = self.memory.arena
        spans = arena.state_spans(0)
        self._crossing.share([arena.memory.view(start, stop - start) for start, stop in spans])

    def _put_back(self) -> None:
        def put_back() -> None:
            self._early = EarlyPart(self._parts)
            here, memory = self._team.neighbours, self.memory
            position = here.index(self._team.world.rank)
            slot, copy_of_buffers = memory.newest_slot, memory.copy_of_buffers
            self._copy(slot, copy_of_buffers, position, len(here), into_slot=False)

        self._crossing.go_back(put_back)

    def _plan_sum(self) -> None:
        crossing, number = self._crossing, self._crossing.number
        lanes = self._cut(crossing.num_lanes)
        self.pieces = [] if number is None else lanes[number]
        slots = self.memory.arena.plan.parameters
        totals = Memory.private(0 if number is None else size_of(slots))
        crossing.plan(self.division, lanes, (totals, 0))
        self.totals = Region(totals, 0, slots).pieces(self.pieces)
