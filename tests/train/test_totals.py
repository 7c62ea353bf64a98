"""When a run ends, and how many global batches there are until then."""

import pytest

from unisono.engine.state.run_state import Position
from unisono.plan.samples import SamplePlan
from unisono.training.loop_plan import Totals

PLAN = SamplePlan(num_samples=10, batch_size=4, shards=2)  # three steps an epoch


@pytest.mark.parametrize(
    ("totals", "position", "is_over", "end_step", "num_batches"),
    [
        (Totals(2, None), Position(0, 0, 0), False, 6, 6),
        (Totals(2, None), Position(5, 1, 2), False, 6, 6),
        (Totals(2, None), Position(6, 2, 0), True, 6, 6),
        (Totals(0, None), Position(0, 0, 0), True, 0, 0),
        (Totals(None, 4), Position(3, 1, 0), False, 4, 4),
        (Totals(None, 4), Position(4, 1, 1), True, 4, 4),
        (Totals(9, 4), Position(0, 0, 0), False, 4, 4),
        (Totals(1, 4), Position(0, 0, 0), False, 3, 3),
        # the run has come further before
        (Totals(1, None), Position(7, 2, 1), True, 7, 7),
        (Totals(None, 2), Position(7, 2, 1), True, 7, 7),
        # epochs were of one step before
        (Totals(4, None), Position(2, 2, 0), False, 8, 12),
        (Totals(None, 9), Position(2, 2, 0), False, 9, 13),
    ],
)
def test_the_first_total_that_is_reached_counts(totals, position, is_over, end_step, num_batches):
    assert totals.are_reached(position) is is_over
    assert totals.end_step(PLAN, position) == end_step
    assert totals.num_batches(PLAN, position) == num_batches


@pytest.mark.parametrize(
    ("totals", "is_passed"),
    [
        (Totals(2, None), True),
        (Totals(3, 7), False),
        (Totals(9, 6), True),
    ],
)
def test_a_total_is_passed_when_the_run_has_come_further(totals, is_passed):
    assert totals.are_passed(Position(7, 2, 1)) is is_passed
    assert not Totals(2, None).are_passed(Position(6, 2, 0))


@pytest.mark.parametrize(
    ("epochs", "steps", "error"),
    [(None, None, ValueError), (-1, None, ValueError), (None, -1, ValueError), (1, 2.5, TypeError)],
)
def test_totals_that_say_no_end_are_refused(epochs, steps, error):
    with pytest.raises(error):
        Totals(epochs, steps)
