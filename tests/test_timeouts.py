"""One table of timeouts, in the code as in the docs."""

from pathlib import Path

import pytest

from unisono.runtime.timeouts import MEETING, TIMEOUTS

GUARANTEES = Path(__file__).parents[1] / "docs" / "failures.md"


def test_the_docs_show_every_timeout_with_its_default() -> None:
    lines = GUARANTEES.read_text().splitlines()
    rows = [line.split("|") for line in lines if line.startswith("| `UNISONO_")]
    told = {row[1].strip(" `"): float(row[2]) for row in rows}
    assert told == {one.variable: one.default_s for one in TIMEOUTS}


@pytest.mark.parametrize("text", ["0", "-1", "inf", "1e300", "nan", "soon"])
def test_what_is_no_number_of_seconds_is_refused(
    text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(MEETING.variable, text)
    with pytest.raises(ValueError, match="`UNISONO_MEETING_TIMEOUT` must be a number of seconds"):
        MEETING.in_s()


@pytest.mark.parametrize(("text", "expected"), [("", 1800), ("2.5", 2.5)])
def test_the_variable_comes_before_the_default(
    text: str, expected: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(MEETING.variable, text)
    assert MEETING.in_s() == expected
