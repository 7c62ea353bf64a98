"""Where time goes: by worker, by stretch, and what is between steps."""

import pytest
from tests.report.synthetic import step_line, to_bytes

from unisono.tools.report.history import PhaseTimes
from unisono.training.events.events import read_event


def step(number, **change):
    return read_event(to_bytes(step_line(number, **change)))


def means(times):
    """Of each stretch, the seconds of all phases and of what is between."""
    rows = zip(*[series.values for series in times.over_steps.values()], strict=True)
    return [[one.mean for one in row] for row in rows]


def test_what_is_beyond_the_phases_is_between():
    times = PhaseTimes()
    rows = [[1, 1, 1, 0, 0, 0], [0, 1, 1, 1, 1, 1]]
    times.add([step(0, ranks=[0, 1], phases=rows, seconds=6)])
    assert means(times) == [[0.5, 1.0, 1.0, 0.5, 0.5, 0.5, 2.0]]
    assert times.by_rank[1].shares["waiting"] == pytest.approx(0.2)


def test_a_lost_worker_did_not_attend():
    times = PhaseTimes()
    times.add(
        [
            step(0, ranks=[0, 1], phases=[[1] * 6, [None] * 6], seconds=6),
            step(1, ranks=[0, 1], phases=[[1] * 6, [2] * 6], seconds=12),
        ]
    )
    assert {rank: one.num_steps for rank, one in times.by_rank.items()} == {0: 2, 1: 1}
    assert means(times) == [[1.0] * 6 + [0.0], [1.5] * 6 + [3.0]]


def test_neighbouring_steps_are_joined():
    times = PhaseTimes(max_stretches=2)
    for number, seconds in enumerate([6, 12, 18]):
        times.add([step(number, ranks=[0], phases=[[number] * 6], seconds=seconds)])
    assert means(times) == [[0.5] * 6 + [6.0], [2.0] * 6 + [6.0]]


def test_each_crew_counts_for_its_workers():
    times = PhaseTimes()
    for ranks, seconds in [([0, 1], 1), ([1], 5), ([1, 0], 2), ([0, 1], 1), ([1], 5)]:
        rows = [[seconds + rank] * 6 for rank in ranks]
        times.add([step(0, ranks=ranks, phases=rows, seconds=6)])
    totals = {rank: (one.phases_s, one.num_steps) for rank, one in times.by_rank.items()}
    assert totals == {0: ([4.0] * 6, 3), 1: ([7.0 + 12.0] * 6, 5)}


def test_a_step_without_columns_is_passed_over():
    times = PhaseTimes()
    times.add([read_event(b'{"event":"step","step":0,"ranks":[0,1]}')])
    assert means(times) == []
