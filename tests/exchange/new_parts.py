"""A fourth carriage and a fourth ownership, in 60 lines each: the next ones are no harder."""

from __future__ import annotations

from unisono.engine.exchange.arena import Region
from unisono.engine.exchange.carriage import Carriage
from unisono.engine.exchange.ownership import Ownership
from unisono.engine.exchange.parts import OrderedSum, OwnParts, Parts, PublishedParts
from unisono.engine.exchange.replicas import (
    begin_alike,
    copy_replica,
    lay_out_alike,
    load_replica,
    roll_back_replica,
)
from unisono.engine.state.optimizer_state import apply_state, take_state
from unisono.engine.state.saved import apply_groups
from unisono.runtime.device import bytes_of


class Mail(Carriage):
    """Every worker sends its parts to all others as messages, and each adds up everything."""

    takes_early = False

    def __init__(self, layout, between):
        super().__init__(layout)
        self._between, self._flags = between, self.arena.flags
        self._slots = self.arena.plan.parameters
        self._own, self._all = (
            OwnParts(self._slots, layout.num_bytes, layout.device) for _ in range(2)
        )
        self._parts = Parts(self._flags, self._own)

    def publish_early(self, part, index, gradient):
        raise NotImplementedError

    def publish(self, part, gradients):
        self._parts.publish(part, gradients)

    def forget_step(self):
        pass

    def gather(self, purpose):
        team, size, division = self.team, self.layout.num_bytes, self.layout.division
        if not self._between.gather(purpose):
            return False
        membership, mine = team.membership, division.parts_of[team.world.rank]
        sent = b"".join(bytes(self._own.memory(node.lo).view(0, size)) for node in mine)
        for rank, letter in team.gather(sent, "letters").items():
            for at, node in enumerate(division.parts_of[rank]):
                self._all.memory(node.lo).view(0, size)[:] = letter[at * size : (at + 1) * size]
        return team.membership == membership

    def plan(self, *, everywhere):
        assert everywhere
        nodes, self.pieces = self.layout.division.parts, self.layout.whole_pieces
        self._between.plan([[]] * self._between.num_lanes, self, None)
        rows = [(self._flags[node.lo],) for node in nodes]
        regions = [Region(self._all.memory(node.lo), 0, self._slots) for node in nodes]
        self._sum = OrderedSum(PublishedParts(nodes, rows, regions), self.pieces)
        self.totals, self.whole = self._sum.totals, self._all[0].tensors()

    def add_up(self, purpose):
        self._between.add_up(self)
        return self._sum.add()

    def await_readers(self, purpose):
        self.team.meet(purpose)

    def close(self):
        pass


class Server(Ownership):
    """One worker of each host updates a replica and keeps the state; the others are sent both."""

    have_all = False

    def bind(self, keys, live):
        self._leader = self.team.membership.leader
        lay_out_alike(self.layout)
        if live is None:
            begin_alike(self, self._write_state, self._read_state)
        else:
            self.load()

    def _write_state(self, slot):
        tensors, numbers = take_state(self.layout.optimizer, self.named_whole())
        self.describe(slot, {"numbers": numbers}, tensors)

    def _read_state(self, slot):
        self.layout.optimizer.state.clear()
        facts, tensors = self.memory.snapshots.facts(slot), self.memory.snapshots.extra(slot)
        apply_state(self.layout.optimizer, self.named_whole(), facts, tensors)

    @property
    def is_lost(self):
        return self.team.membership.leader != self._leader

    def trust(self):
        self._leader = self.team.membership.leader

    def load(self):
        roll_back_replica(self, self._read_state)

    def discard_changes(self):
        self._read_state(load_replica(self.layout))

    def copy(self, slot, copy_of_buffers, position, size):
        copy_replica(self.layout, slot, copy_of_buffers, position, size, into_slot=True)

    def plan(self):
        self.carriage.plan(everywhere=True)

    def all_sums(self, purpose):
        return True

    def are_read(self, purpose):
        return True

    def agree(self, value, purpose):
        return [value]

    def share(self, purpose):
        team, membership = self.team, self.team.membership
        mine = [bytes_of(parameter) for parameter in self.layout.parameters]
        heard = team.gather(b"".join(mine) if team.leads_host else b"", purpose)
        if team.membership != membership:
            return False
        letter, at = heard[team.host_leaders[team.host]], 0
        for view in mine:
            view[:] = letter[at : at + view.nbytes]
            at += view.nbytes
        return True

    def hand_out(self):
        facts, tensors = self.memory.newest()
        apply_state(self.layout.optimizer, self.named_whole(), facts, tensors)
        apply_groups(facts["groups"], self.layout.optimizer)

    def leave(self):
        pass
