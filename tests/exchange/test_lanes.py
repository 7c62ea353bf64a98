"""Who waits for a lane's sums gives up where the others stop, too, and nowhere else."""

from types import SimpleNamespace

import pytest

from unisono.engine.exchange.lanes import Lanes
from unisono.runtime.workers.meeting_point import Departure


class Waiting(Lanes):
    number = 0  # the lane of ranks 0 and 2


@pytest.mark.parametrize(
    ("lost", "is_at_next_meeting", "gives_up"),
    [
        ((), False, False),
        ((3,), False, True),  # nobody meets it any more
        ((3,), True, False),  # all meet once more, also those of its own lane
        ((0,), True, True),  # of this lane: what it has sent may not have come
        ((0, 3), True, True),
    ],
)
def test_a_loss_ends_the_wait_if_it_ends_the_meeting(lost, is_at_next_meeting, gives_up):
    waiting = Waiting.__new__(Waiting)
    waiting._team = SimpleNamespace(
        hosts=((0, 1), (2, 3)),
        membership=SimpleNamespace(ranks=(0, 1, 2, 3)),
        has_lost=bool(lost),
        departure=lambda rank: Departure.DIED if rank in lost else Departure.PRESENT,
        is_ahead=lambda rank: is_at_next_meeting,
    )
    assert waiting._is_in_vain is gives_up
