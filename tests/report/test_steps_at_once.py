"""Steps that are read together are those that are read one by one, and add up to the same."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.report.lines import history_of
from tests.report.synthetic import run_lines, to_bytes

from unisono.training.events.events import StepEvent, read_event
from unisono.training.events.follow import EventReader, read_steps

STEPS = [line for line in run_lines(num_steps=160) if line["event"] == "step"]
ODD = [None, True, -1, 1, 0.5, 1e13, -0.5, 2**60, 10**400, "nan", "inf", "x", [], [1], [None], {}]
ODD += [float("nan"), float("inf"), [0.5] * 4, [0.5, None, 1, 2], [0, 1, 2, True], ["x"] * 4]
ODD += [{"loss": "nan"}, {"loss": 1}, {"loss": [1.0]}, [[]] * 4, [0.5] * 4097, [1e12] * 4]


def one_by_one(lines):
    found = []
    for line in lines:
        try:
            found.append(read_event(line))
        except ValueError:
            found.append(None)
    return found


def in_words(events):
    """Types of values, and NaN, are compared, too."""
    return list(map(repr, events))


def test_usual_steps_are_read_together():
    lines = list(map(to_bytes, STEPS))
    lines[7] = to_bytes({**STEPS[7], "delayed_s": [0.5] * len(STEPS[7]["ranks"])})
    steps = read_steps(lines)
    assert steps == one_by_one(lines)
    assert type(steps[0]) is StepEvent
    assert vars(steps[0]) == vars(read_event(lines[0]))


@pytest.mark.parametrize("key", ["event", "surprise", *vars(read_event(to_bytes(STEPS[0])))])
def test_a_step_that_is_odd_is_read_as_it_is_alone(key):
    for odd in ODD:
        lines = [*map(to_bytes, STEPS[:2]), to_bytes({**STEPS[2], key: odd})]
        steps = read_steps(lines)
        assert steps is None or in_words(steps) == in_words(one_by_one(lines))


@pytest.mark.parametrize(
    "torn",
    [
        b'{"event":"step","step":1}}\n',
        b'{"event":"step","step":1} \n',
        b'{"event":"step","step":1},{"event":"step","step":2}\n',
        b'{"event":"step","step":1,"event":"end"}\n',
        b'{"event":"step","step":\xff}\n',
        b'{"event":"step","step":' + b"[" * 200_000 + b"\n",
    ],
)
def test_what_is_no_single_step_is_left_to_be_read_alone(torn):
    assert read_steps([to_bytes(STEPS[0]), torn]) is None


@pytest.mark.slow
@given(st.data())
def test_a_file_says_the_same_however_its_lines_lie_together(tmp_path_factory, data):
    lines = list(run_lines(num_steps=90, lost_at=20))
    for _ in range(data.draw(st.integers(0, 4))):
        at = data.draw(st.integers(0, len(lines) - 1))
        key = data.draw(st.sampled_from([*lines[at]]))
        lines[at] = {**lines[at], key: data.draw(st.sampled_from(ODD))}
    rows = [to_bytes(line) for line in lines]
    rows.insert(data.draw(st.integers(0, len(rows))), data.draw(st.binary(max_size=9)) + b"\n")
    folder = tmp_path_factory.mktemp("run")
    (folder / "events.jsonl").write_bytes(b"".join(rows) + b'{"event":"st')
    reader = EventReader(folder / "events.jsonl")
    together = list(reader.new_events())
    alone = one_by_one(row + b"\n" for row in b"".join(rows).split(b"\n")[:-1] if row.strip())
    assert in_words(together) == in_words(filter(None, alone))


def test_the_first_values_that_are_not_finite_are_marked_in_their_order():
    lines = [*run_lines(num_steps=700)]
    lines[300]["means"] = {"loss": "nan", "other": 2.0}
    lines[301]["means"] = {"accuracy": "inf", "loss": "nan"}
    made = history_of(*lines)
    assert [mark.text for mark in made.marks[2:]] == [
        "loss is nan for the first time",
        "accuracy is inf for the first time",
    ]
    assert made.means["other"].last == 2.0
    assert made.means["loss"].first_not_finite == lines[300]["step"]
