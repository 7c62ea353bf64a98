"""A forecast on terminals wide and narrow, and as a page."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from tests.forecast.made import profile, timed

from unisono.forecast.cluster import Cluster
from unisono.forecast.facts import Forecast
from unisono.forecast.outlook import Failures, expectations
from unisono.report.forecast_page import forecast_page, write_forecast
from unisono.report.forecast_table import chart, long_duration, print_forecast

COUNTS = [1, 2, 8, 32, 1024]


def forecast(**options: Any) -> dict[str, Any]:
    found = profile(
        timed((8,), 0.01, spread=0.05), timed((4, 4), 0.011, spread=0.05), megabytes=100
    )
    cluster, failures = Cluster(cores=8, per_host=8), Failures(1e7, 10.0, 60.0, 600.0)
    rows = expectations(found, COUNTS, cluster, failures, epochs=10)
    return Forecast("train.py", "cpu", found, cluster, failures, 10, rows).as_json | options


FOUND = forecast()


def printed(width: int, encoding: str = "utf-8", found: dict[str, Any] = FOUND) -> str:
    file = io.TextIOWrapper(io.BytesIO(), encoding=encoding, errors="replace")
    console = Console(file=file, width=width, force_terminal=False, legacy_windows=False)
    print_forecast(console, found)
    file.flush()
    assert isinstance(file.buffer, io.BytesIO)
    return file.buffer.getvalue().decode(encoding)


@pytest.mark.parametrize("width", [200, 80, 60, 40, 20])
def test_no_line_is_wider_than_the_terminal_and_what_counts_stays(width: int) -> None:
    lines = printed(width).splitlines()
    assert max(map(len, lines)) <= width
    head, *rows = lines[: 1 + len(COUNTS)]
    assert head.split()[0] == "workers"
    assert "speed-up" in head
    assert ("efficiency" in head) == (width >= 40)
    assert ("hosts" in head) == (width >= 80)
    assert [row.split()[0] for row in rows] == [f"{number:,}" for number in COUNTS]


def test_a_terminal_without_unicode_gets_plain_signs() -> None:
    text = printed(80, "ascii")
    assert "━" not in text
    assert "|" in text


def test_bars_end_where_the_speed_up_is_and_marks_where_it_would_be_ideal() -> None:
    rows = [
        {"workers": 1, "speed_up": 1.0},
        {"workers": 4, "speed_up": 2.0},
        {"workers": 16, "speed_up": 16.0},
        {"workers": 2, "speed_up": 0.5},
    ]
    lines = [line.plain for line in chart(rows, 21)]  # 17 cells: four for each doubling
    assert lines == [
        " 1 │",
        " 4 ━━━━╌╌╌╌│",
        "16 ━━━━━━━━━━━━━━━━│",
        " 2 ╌╌╌╌│",
    ]
    more = [line.plain for line in chart([{"workers": 2, "speed_up": 4.0}], 20)]
    assert more == ["2 ━━━━━━━━│━━━━━━━"]
    assert list(chart(rows, 8)) == []


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(None, "never"), (7.2e6, "2,000 h"), (2.25e5, "62.5 h"), (3600, "1 h"), (90, "1 min 30 s")],
)
def test_long_times_are_told_in_hours(seconds: float | None, words: str) -> None:
    assert long_duration(seconds) == words


def test_the_page_has_the_curve_the_ideal_line_and_what_is_supposed(tmp_path: Path) -> None:
    target = write_forecast(tmp_path / "a page.html", FOUND)
    text = target.read_text()
    assert text == forecast_page(FOUND)
    for words in ("Speed-up and the ideal line", "What a step consists of", "1,024", "train.py"):
        assert words in text
    assert "<script>alert" not in forecast_page(forecast(program="<script>alert(1)</script>"))


def test_a_forecast_of_numbers_is_drawn_without_a_band() -> None:
    rows = [{**row, "step_band_s": None, "speed_up_band": None} for row in FOUND["rows"]]
    found = forecast(program=None, rows=rows)
    assert "90 % of it" not in printed(200, found=found)
    assert "resampled" not in forecast_page(found)
