"""A group that does what NCCL's does, between threads of one process; see ``nccl_communicator``.

It is made of a store as NCCL's is: rank 0 says what the group is called, and the others wait for
it. All calls of a group must come in one order. A call whose members do not all come waits until
the group is aborted, and has brought nothing then.
"""

from __future__ import annotations

import itertools
import threading

import torch

COME_WITHIN_S = 20.0


class Wires:
    """What the members of one group share."""

    def __init__(self, size):
        self.size = size
        self.changed = threading.Condition()
        self.calls = []  # each: kind, {position: what it sends to each}


class FakeNccl:
    """One member's group."""

    names = itertools.count()
    wires: dict[str, Wires] = {}  # noqa: RUF012

    def __init__(self, store, position, size, device):
        self.position, self.size, self.device = position, size, device
        if position == 0:
            name = str(next(FakeNccl.names))
            FakeNccl.wires[name] = Wires(size)
            store.set("0", name.encode())
        else:
            name = store.get("0").decode()
        self.net = FakeNccl.wires[name]
        self.num_calls = self.num_aborts = 0
        self.is_aborted = False

    def alltoall_base(self, received, sent, from_each, to_each):
        return self._call("all_to_all", received, sent.split(to_each))

    def _allgather_base(self, received, sent):
        return self._call("all_gather", received, [sent] * self.size)

    def abort(self):
        with self.net.changed:
            self.num_aborts += 1
            self.is_aborted = True
            self.net.changed.notify_all()

    def _call(self, kind, received, pieces):
        if self.is_aborted:
            raise RuntimeError("NCCL communicator was aborted")
        number, self.num_calls = self.num_calls, self.num_calls + 1
        with self.net.changed:
            if number == len(self.net.calls):
                self.net.calls.append((kind, {}))
            there, sent = self.net.calls[number]
            assert there == kind, f"call {number} is {kind} here and {there} elsewhere"
            sent[self.position] = [piece.detach().cpu() for piece in pieces]
            self.net.changed.notify_all()
        return Call(self, sent, received)


class Call:
    """What NCCL calls work."""

    def __init__(self, group, sent, received):
        self.group, self.sent, self.received = group, sent, received
        self.is_done = False

    def wait(self):
        group = self.group
        with group.net.changed:
            came = group.net.changed.wait_for(
                lambda: group.is_aborted or len(self.sent) == group.size, COME_WITHIN_S
            )
        assert came, f"rank {group.position} waits for ever"
        if len(self.sent) == group.size and not self.is_done:
            self.is_done = True
            parts = [self.sent[position][group.position] for position in range(group.size)]
            self.received.copy_(torch.cat(parts))
