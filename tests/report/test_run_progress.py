"""What a run comes to: who works, how far it is, how it ended; the same for all who read it."""

import math

import pytest
from tests.report.lines import event, step, workers
from tests.report.synthetic import start_line, to_bytes

from unisono.tools.report.run_progress import RunProgress
from unisono.training.events.events import End, Failure, read_event


def events(lines):
    return [read_event(to_bytes(line)) for line in lines]


def progress(*lines):
    made = RunProgress()
    for one in events(lines):
        made.add(one)
    return made


def failure(number, rank=1, error="A"):
    return event("failure", number, rank=rank, error=error, message="m")


def test_of_no_events_nothing_is_known():
    made = RunProgress()
    assert (made.first, made.ended, made.last_step, made.epoch) == (None, None, None, None)
    assert (made.num_done, made.num_steps, made.ranks, made.seconds) == (0, 0, (), 0.0)
    assert math.isnan(made.began_unix_s)


# What each event leaves: steps done, who computes, who is missing.
@pytest.mark.parametrize(
    ("lines", "num_done", "ranks", "lost"),
    [
        ([start_line()], 0, (0, 1), set()),
        ([start_line(step=250)], 250, (0, 1), set()),
        ([start_line(), step(7, 1)], 8, (0, 1), set()),
        ([start_line(), workers(5, ranks=[0], lost=[1])], 0, (0,), {1}),
        (
            [
                start_line(),
                workers(5, ranks=[0], lost=[1]),
                workers(9, ranks=[0, 1], joined=[1]),
            ],
            0,
            (0, 1),
            set(),
        ),
        ([start_line(), workers(5, ranks=[0], lost=[1]), start_line(step=5)], 5, (0, 1), set()),
        ([start_line(), step(7, 1), event("went_back", 3, from_step=8)], 3, (0, 1), set()),
        ([start_line(), step(7, 1), event("end", 8)], 8, (0, 1), set()),
        ([start_line(), step(7, 1, ranks=[0])], 8, (0,), set()),
        ([start_line(), {"event": "step", "step": 7}], 8, (0, 1), set()),
    ],
)
def test_who_works_and_how_far_it_is(lines, num_done, ranks, lost):
    made = progress(*lines)
    assert (made.num_done, made.ranks, made.lost) == (num_done, ranks, lost)


def test_a_step_counts_once_however_often_it_comes():
    made = RunProgress()
    lines = [step(0, 1), step(1, 2), event("went_back", 1, from_step=2), step(1, 3), step(2, 4)]
    assert [made.add(one) for one in events(lines)] == [True, True, True, False, True]
    assert (made.num_steps, made.num_done) == (3, 3)


def test_who_was_lost_is_counted_over_all_fits():
    lost = workers(5, ranks=[0], lost=[1])
    assert progress(start_line(), lost, start_line(step=5), lost).num_lost == 2


@pytest.mark.parametrize(
    ("lines", "kind", "error"),
    [
        ([failure(7), failure(7, rank=0, error="B")], Failure, "A"),  # the first word counts
        ([failure(7), step(7, 2)], None, None),  # a replacement failed, and the others go on
        ([failure(7), step(7, 2), failure(8, error="B")], Failure, "B"),
        ([failure(7), event("end", 8)], End, None),
        ([event("end", 8)], End, None),
        ([event("end", 8), start_line(step=8)], None, None),
        ([event("end", 8), failure(8)], Failure, "A"),
        ([event("interrupted", 8, by="SIGINT"), start_line(step=8)], None, None),
    ],
)
def test_how_it_ended(lines, kind, error):
    ended = progress(start_line(), *lines).ended
    assert isinstance(ended, kind or type(None))
    assert getattr(ended, "error", None) == error


def test_a_pause_between_two_fits_is_no_time_of_them():
    made = progress(
        start_line(time_unix_s=100.0),
        {**step(0, 0), "time_unix_s": 101.0},
        {**step(1, 0), "time_unix_s": "nan"},
        start_line(step=1, time_unix_s=500.0),
        {**step(2, 0), "time_unix_s": 501.5},
    )
    assert made.seconds == 2.5
    assert (made.began_unix_s, made.last_unix_s) == (100.0, 501.5)
