"""What one rank holds of a group, from the rendezvous to the end.

A call that fails half-way ends the group for this rank; the other ranks learn the reason.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from torch._C._distributed_c10d import Store

from unisono.c10d.board import Board, Meetings
from unisono.c10d.calls import encode
from unisono.c10d.execution import Call, Execution
from unisono.c10d.group_rendezvous import shared_memory
from unisono.c10d.heap import Blocks
from unisono.c10d.meeting import Meeting
from unisono.c10d.messages import Messages
from unisono.c10d.peers import Peers
from unisono.c10d.vectors import Vectors
from unisono.workers.meeting_point import Departure

LATE_AT_MOST_S = 10.0


class GroupMember:
    """What one rank holds of a group. Collective: every rank makes one. Final.

    Args:
        store: where rank 0 of the group tells the others of its memory; not kept.
        rank: this rank in the group.
        names: each rank of the group as the program knows it, its global rank.
        timeout_s: how long a wait may last.
    """

    def __init__(self, store: Store, rank: int, names: Sequence[int], timeout_s: float) -> None:
        with shared_memory(store, rank, len(names), timeout_s) as self.region:
            self._peers = Peers(self.region, rank, names)
            try:
                self._meeting = Meeting(self.region, self._peers, timeout_s)
                self._meeting.announce(encode("init_process_group"))
                self._meeting.meet()
            except BaseException as error:
                self._peers.leave(Departure.FAILED, str(error))
                raise
        self.board = Board(self.region, self._meeting)
        blocks = Blocks(self.region.mapping, self.region.layout.heap(rank))
        self.messages = Messages(self.region, blocks, self._peers, timeout_s)
        self.execution = Execution()

    def run(
        self,
        call: bytes,
        steps: Meetings,
        vectors: Vectors,
        timeout_s: float | None,
        is_async: bool,
    ) -> tuple[Call, ...]:
        """Announce a call and carry it out. Collective: every rank calls it, in the same order.

        Args:
            call: what :func:`~unisono.c10d.calls.encode` returned.
            steps: what to do once it is announced.
            vectors: what that works on.
            timeout_s: how long each wait may last; the group's limit if None.
            is_async: return within milliseconds, whether it is done or not.

        Returns:
            What is left to wait for: nothing, unless `is_async`.
        """

        def announced() -> Meetings:
            vectors.read()
            self._meeting.announce(call, timeout_s)
            yield from steps
            vectors.write_back()

        made = Call(self._meeting, announced())
        return () if self.execution.carry_out(made, is_async=is_async) else (made,)

    def refuse(self) -> None:
        """Tell the others that this rank's arguments are wrong, without waiting for them."""

        def refusal() -> Meetings:
            self._meeting.refuse()
            yield from ()

        self.execution.carry_out(Call(self._meeting, refusal()), is_async=True)

    def set_timeout(self, timeout_s: float) -> None:
        """Say how long waits may last from now on."""
        self._meeting.timeout_s = self.messages.timeout_s = timeout_s

    def leave(self) -> None:
        """Leave in order, and free the memory.

        Waits some seconds for calls in the helper, as other ranks may just be late, unless the
        program is failing.
        """
        if sys.exc_info()[0] is None:
            self.execution.finish(LATE_AT_MOST_S)
        self._meeting.leave()
        self._let_go()

    def abort(self) -> None:
        """Leave because this rank cannot go on; also ends the wait of another thread."""
        self._meeting.give_up("the process group was aborted.")
        self._let_go()

    def _let_go(self) -> None:
        self.execution.close()
        self.board.close()
