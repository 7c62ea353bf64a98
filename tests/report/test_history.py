"""One pass over a file: what is counted, what is marked, how small what is kept stays."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.report.lines import history_of
from tests.report.synthetic import step_line, to_bytes, write_run

from unisono.tools.report.history import PhaseTimes, Series, gather
from unisono.training.events.events import End, read_event


def step(number, **change):
    return step_line(number, ranks=[0], phases=[[0.001] * 6], **{"seconds": 0.01, **change})


def test_a_run_is_gathered(tmp_path):
    history = gather(write_run(tmp_path))
    assert (history.progress.num_steps, history.progress.num_done) == (300, 300)
    assert isinstance(history.progress.ended, End)
    assert len(history.marks) == 2
    assert (history.marks[0].step, history.marks[0].text) == (120, "worker 1 was killed by SIGKILL")
    assert history.validation["loss"].values[-1].last_step == 300
    assert sorted(history.phases.by_rank) == [0, 1, 2, 3]
    assert history.phases.by_rank[1].num_steps == 288
    assert history.progress.ranks == (0, 1, 2, 3)
    assert history.progress.num_checkpoints == 3


def test_speed_is_samples_over_seconds_not_a_mean_of_speeds():
    history = history_of(step(0, num_samples=64), step(1, num_samples=0, seconds=0.03))
    history.samples_per_second._halve()
    assert history.samples_per_second.values[0].mean == pytest.approx(64 / 0.04)


def test_the_best_value_is_the_least_loss_and_of_others_the_last_one_counts():
    history = history_of(
        *(
            {"event": "evaluation", "step": i, "means": {"loss": value, "x": value}}
            for i, value in enumerate([3, 1, "nan", 4, "inf"])
        )
    )
    assert history.best == {"loss": (1, 1.0), "x": (4, math.inf)}


@pytest.mark.parametrize(
    ("content", "told"), [(b"", "has no events:"), (b"x\ny\n", r"\(2 lines cannot be read\)")]
)
def test_a_file_that_tells_nothing_is_refused(tmp_path, content, told):
    (tmp_path / "events.jsonl").write_bytes(content)
    with pytest.raises(ValueError, match=told):
        gather(tmp_path)


def filled(values, max_stretches=4):
    series = Series(max_stretches)
    for step, value in enumerate(values):
        series.add(step, value)
    return series


@pytest.mark.parametrize(
    ("num_values", "width", "steps"),
    [
        (0, 1, []),
        (1, 1, [(0, 0)]),
        (4, 1, [(0, 0), (1, 1), (2, 2), (3, 3)]),
        (5, 2, [(0, 1), (2, 3), (4, 4)]),
        (8, 2, [(0, 1), (2, 3), (4, 5), (6, 7)]),
        (9, 4, [(0, 3), (4, 7), (8, 8)]),
    ],
)
def test_neighbours_become_one_when_it_is_full(num_values, width, steps):
    series = filled(range(num_values))
    assert series.width == width
    assert [(v.first_step, v.last_step) for v in series.values] == steps


@pytest.mark.slow
@given(st.lists(st.integers(-1000, 1000), max_size=200), st.integers(2, 9))
def test_stretches_cover_all_values_once(values, max_stretches):
    kept = filled(values, max_stretches).values
    assert len(kept) <= max_stretches
    assert [step for v in kept for step in range(v.first_step, v.last_step + 1)] == list(
        range(len(values))
    )
    for v in kept:
        part = values[v.first_step : v.last_step + 1]
        assert v.mean == sum(part) / len(part)


def test_a_mean_is_over_samples():
    series = Series(2)
    for step, (value, weight) in enumerate([(1.0, 3), (5.0, 1), (9.0, 1)]):
        series.add(step, value, weight)
    assert [v.mean for v in series.values] == [2.0, 9.0]


def test_what_is_not_finite_is_counted_and_leaves_means_alone():
    series = filled([1.0, math.nan, math.inf, math.nan, 5.0])
    assert [v.mean for v in series.values] == [1.0, None, 5.0]
    assert [v.num_not_finite for v in series.values] == [1, 2, 0]
    assert series.first_not_finite == 1
    assert (series.last, series.last_step) == (5.0, 4)


def step_done(number, **change):
    return read_event(to_bytes(step_line(number, **change)))


def means(times):
    """Of each stretch, the seconds of all phases and of what is between."""
    rows = zip(*[series.values for series in times.over_steps.values()], strict=True)
    return [[one.mean for one in row] for row in rows]


def test_what_is_beyond_the_phases_is_between():
    times = PhaseTimes()
    rows = [[1, 1, 1, 0, 0, 0], [0, 1, 1, 1, 1, 1]]
    times.add([step_done(0, ranks=[0, 1], phases=rows, seconds=6)])
    assert means(times) == [[0.5, 1.0, 1.0, 0.5, 0.5, 0.5, 2.0]]
    assert times.by_rank[1].shares["waiting"] == pytest.approx(0.2)


def test_a_lost_worker_did_not_attend():
    times = PhaseTimes()
    times.add(
        [
            step_done(0, ranks=[0, 1], phases=[[1] * 6, [None] * 6], seconds=6),
            step_done(1, ranks=[0, 1], phases=[[1] * 6, [2] * 6], seconds=12),
        ]
    )
    assert {rank: one.num_steps for rank, one in times.by_rank.items()} == {0: 2, 1: 1}
    assert means(times) == [[1.0] * 6 + [0.0], [1.5] * 6 + [3.0]]


def test_each_crew_counts_for_its_workers():
    times = PhaseTimes()
    for ranks, seconds in [([0, 1], 1), ([1], 5), ([1, 0], 2), ([0, 1], 1), ([1], 5)]:
        rows = [[seconds + rank] * 6 for rank in ranks]
        times.add([step_done(0, ranks=ranks, phases=rows, seconds=6)])
    totals = {rank: (one.phases_s, one.num_steps) for rank, one in times.by_rank.items()}
    assert totals == {0: ([4.0] * 6, 3), 1: ([7.0 + 12.0] * 6, 5)}


def test_a_step_without_columns_is_passed_over():
    times = PhaseTimes()
    times.add([read_event(b'{"event":"step","step":0,"ranks":[0,1]}')])
    assert means(times) == []
