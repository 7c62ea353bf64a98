"""Why a run is not faster: its time is divided without rest, and what stands out is said."""

import pytest
from tests.report.lines import event, history_of
from tests.report.synthetic import (
    BEGAN_UNIX_S,
    run_lines,
    speed_found,
    start_line,
    step_line,
    to_bytes,
)

from unisono.report import why
from unisono.report.events import read_event
from unisono.report.time_spent import PartOfTime

ROW = [0.5, 1.0, 2.0, 0.25, 0.125, 0.125]


def steps(num_steps, *, at_s=0.0, first=0, ranks=(0,), row=ROW, seconds=4.25):
    """Steps of 4 s of phases, and some between."""
    for number in range(num_steps):
        end_s = at_s + (number + 1) * seconds
        yield step_line(
            first + number,
            ranks=list(ranks),
            phases=[row] * len(ranks),
            seconds=seconds,
            time_unix_s=BEGAN_UNIX_S + end_s,
        )


def found(made):
    return {part.name: part.seconds for part in why.parts(made)}


def test_time_is_divided_without_rest():
    speed = {"findings": [], "seconds": 10.0, "snapshots_s": 0.5, "disk_s": 0.25}
    made = history_of(
        start_line(num_workers=1, started_unix_s=BEGAN_UNIX_S - 6),
        *steps(2),
        event("evaluation", 2, 11.5, seconds=2.0, means={}),
        event("end", 2, 12.0, seconds=10.0, speed=speed),
    )
    assert found(made) == pytest.approx(
        {
            "starting up": 6.0,
            "loading": 1.0,
            "forward": 2.0,
            "backward": 4.0,
            "waiting": 0.5,
            "summing": 0.25,
            "updating": 0.25,
            "snapshots": 0.5,
            "checkpoints": 0.25,
            "evaluation": 2.0,
            "between": 12.0 - 8.0 - 2.75,
        }
    )
    assert sum(part.share for part in why.parts(made)) == pytest.approx(1.0)
    assert all(part.explained for part in why.parts(made))


def test_several_fits_add_up():
    def fit(at_s, first, started_unix_s, ends):
        speed = {"findings": [], "seconds": 1.0, "snapshots_s": 0.5}
        yield start_line(
            num_workers=1,
            step=first,
            started_unix_s=started_unix_s,
            time_unix_s=BEGAN_UNIX_S + at_s,
        )
        yield from steps(1, at_s=at_s, first=first)
        yield event("speed", first + 1, at_s + 4.25, speed=speed)
        if ends:
            yield event("end", first + 1, at_s + 4.5, speed={**speed, "snapshots_s": 0.75})

    made = history_of(
        *fit(0, 0, BEGAN_UNIX_S - 2, True),  # then the program calls `fit` again
        *fit(10, 1, BEGAN_UNIX_S - 2, False),  # and is killed
        *fit(50, 2, BEGAN_UNIX_S + 47, False),  # and started again
    )
    seconds = found(made)
    assert seconds["starting up"] == pytest.approx(2.0 + 3.0)
    assert seconds["snapshots"] == pytest.approx(0.75 + 0.5 + 0.5)
    assert seconds["forward"] == pytest.approx(3.0)


@pytest.mark.parametrize("started_unix_s", [None, BEGAN_UNIX_S + 5, -1e300, "nan"])
def test_a_start_that_nobody_knows_takes_no_time(started_unix_s):
    made = history_of(start_line(started_unix_s=started_unix_s), *steps(1))
    assert "starting up" not in found(made)


def test_nothing_is_divided_by_nothing():
    nothing = step_line(0, ranks=[0], phases=[[0.0] * 6], seconds=0.0)
    made = history_of(start_line(), nothing)
    assert why.parts(made) == []
    assert why.said(made)


def test_the_runs_own_findings_come_first():
    said = why.said(history_of(*run_lines()))
    assert said[0] == (
        "Worker 2 is slow in its passes: 10.4 ms a step, 4.7 ms more, which costs 28 % of the run: "
        "look at what else runs on its core."
    )
    assert said[-1] == (
        "Of 4 cores the workers used 3.1 when the run was last looked at, other programs 0.8."
    )


@pytest.mark.parametrize(
    ("parts", "words"),
    [
        ({"starting up": 0.5}, "starting up takes 50 % of the time: a longer run has less of it"),
        ({"loading": 0.2}, "loading takes 20 % of the time: `loader_workers=2` reads ahead"),
        ({"checkpoints": 0.1}, "waiting for checkpoints takes 10 % of the time"),
        ({"evaluation": 0.3}, "evaluation takes 30 % of the time: validate less often"),
        ({"between": 0.2}, "what lies between steps takes 20 % of the time: look at callbacks"),
        ({"loading": 0.05, "evaluation": 0.05, "forward": 0.9}, None),
    ],
)
def test_what_takes_much_has_a_remedy(parts, words):
    said = list(why._of_parts([PartOfTime(name, 1.0, share) for name, share in parts.items()]))
    assert len(said) == (words is not None)
    assert words is None or said[0].startswith(words)


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        ([], "The steps were too few to tell whether a worker is slow."),
        (
            [event("speed", 1, 3.0, speed={"findings": [], "seconds": 3.0})],
            "Nothing stands out: no worker is slow, and the machine was not too busy.",
        ),
    ],
)
def test_that_nothing_stands_out_is_said(lines, words):
    row = [0.0, 1.0, 2.0, 1.0, 0.0, 0.0]
    made = history_of(start_line(), *steps(1, ranks=(0, 1), row=row, seconds=4.0), *lines)
    assert why.said(made) == [words]


def test_one_worker_has_nobody_to_wait_for():
    made = history_of(start_line(), *steps(1, row=[0.0, 1.0, 2.0, 0.0, 1.0, 0.0], seconds=4.0))
    assert why.said(made) == ["Nothing stands out: the time goes into computing."]


@pytest.mark.parametrize(
    "speed",
    [
        {"findings": {}},
        {"findings": [1]},
        {"findings": [{"rank": "1"}]},
        {"findings": [{"sentence": 3}]},
        {"findings": [{"phases": [1]}]},
        {"machine": [2]},
        {"machine": {"cores": -1}},
        [1],
    ],
)
@pytest.mark.parametrize("kind", ["speed", "end"])
def test_a_wrong_type_makes_the_line_unreadable(kind, speed):
    with pytest.raises(ValueError):
        read_event(to_bytes(event(kind, 1, speed=speed)))


@pytest.mark.parametrize("speed", [{}, {"findings": [{}], "machine": None}, None])
def test_what_is_missing_is_no_error(speed):
    made = history_of(start_line(), *steps(1), event("speed", 1, 5.0, speed=speed))
    assert why.said(made)


def test_no_more_is_told_than_can_be_read():
    one = speed_found(0, seconds=1.0)
    one["findings"] *= 500
    made = history_of(start_line(), *steps(1), event("speed", 1, 5.0, speed=one))
    assert len(why.said(made)) < 20
