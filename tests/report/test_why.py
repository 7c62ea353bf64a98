"""Why a run is not faster: its time is divided without rest, and what stands out is said."""

import re

import pytest
from tests.report.lines import event, history_of
from tests.report.synthetic import (
    BEGAN_UNIX_S,
    start_line,
    step_line,
    write_run,
)

from unisono.report import why
from unisono.report.history import gather
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
    made = history_of(
        start_line(num_workers=1, started_unix_s=BEGAN_UNIX_S - 6),
        *steps(2),
        event("evaluation", 2, 11.5, seconds=2.0, means={}),
        event("end", 2, 12.0, seconds=10.0, snapshots_s=0.5, disk_s=0.25),
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
        yield start_line(
            num_workers=1,
            step=first,
            started_unix_s=started_unix_s,
            time_unix_s=BEGAN_UNIX_S + at_s,
        )
        yield from steps(1, at_s=at_s, first=first)
        if ends:
            yield event("end", first + 1, at_s + 4.5, snapshots_s=0.75)

    made = history_of(
        *fit(0, 0, BEGAN_UNIX_S - 2, True),  # then the program calls `fit` again
        *fit(10, 1, BEGAN_UNIX_S - 2, True),
        *fit(50, 2, BEGAN_UNIX_S + 47, False),  # and started again
    )
    seconds = found(made)
    assert seconds["starting up"] == pytest.approx(2.0 + 3.0)
    assert seconds["snapshots"] == pytest.approx(0.75 + 0.75)
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


def test_what_its_steps_show_comes_first(tmp_path):
    said = why.said(gather(write_run(tmp_path, slow=2)))
    assert said[0].startswith("Worker 2 is slow in its passes: ")
    assert re.search(r", which costs 3\d % of the time: look at ", said[0])


@pytest.mark.parametrize(
    ("parts", "words"),
    [
        ({"starting up": 0.5}, "starting up takes 50 % of the time: a longer run has less of it"),
        ({"checkpoints": 0.1}, "waiting for checkpoints takes 10 % of the time"),
        ({"evaluation": 0.3}, "evaluation takes 30 % of the time: validate less often"),
        ({"loading": 0.5, "evaluation": 0.05, "forward": 0.9}, None),
    ],
)
def test_what_takes_much_has_a_remedy(parts, words):
    said = list(why._of_parts([PartOfTime(name, 1.0, share) for name, share in parts.items()]))
    assert len(said) == (words is not None)
    assert words is None or said[0].startswith(words)


@pytest.mark.parametrize(
    ("findings", "words"),
    [
        (None, "The steps were too few to tell whether a worker is slow."),
        ((), "Nothing stands out: no worker is slow, and the machine was not too busy."),
    ],
)
def test_that_nothing_stands_out_is_said(findings, words):
    row = [0.0, 1.0, 2.0, 1.0, 0.0, 0.0]
    made = history_of(start_line(), *steps(1, ranks=(0, 1), row=row, seconds=4.0))
    made.findings = findings
    assert why.said(made) == [words]


def test_one_worker_has_nobody_to_wait_for():
    made = history_of(start_line(), *steps(1, row=[0.0, 1.0, 2.0, 0.0, 1.0, 0.0], seconds=4.0))
    assert why.said(made) == ["Nothing stands out: the time goes into computing."]
