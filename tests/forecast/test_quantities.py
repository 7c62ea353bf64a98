"""What people write for times, bytes and numbers of workers is read, or refused."""

from __future__ import annotations

import pytest

from unisono.forecast.quantities import (
    BYTES,
    BYTES_PER_S,
    TIMES_S,
    counts,
    quantity,
    share,
    whole,
)


@pytest.mark.parametrize(
    ("text", "units", "number"),
    [
        ("7.2s", TIMES_S, 7.2),
        ("50us", TIMES_S, 5e-5),
        ("50 µs", TIMES_S, 5e-5),
        ("5000h", TIMES_S, 1.8e7),
        ("1e3ms", TIMES_S, 1.0),
        ("10Gbit/s", BYTES_PER_S, 1.25e9),
        ("100 Mbit/s", BYTES_PER_S, 1.25e7),
        ("1.5GB/s", BYTES_PER_S, 1.5e9),
        ("102MB", BYTES, 1.02e8),
        ("2MiB", BYTES, 2.0**21),
    ],
)
def test_a_number_has_a_unit(text: str, units: dict[str, float], number: float) -> None:
    assert quantity(text, units) == pytest.approx(number, rel=1e-12)


@pytest.mark.parametrize("text", ["", "7.2", "s", "7.2 fortnights", "0s", "-1s", "1..2s", "1e999s"])
def test_what_is_no_time_is_refused(text: str) -> None:
    with pytest.raises(ValueError):
        quantity(text, TIMES_S)


def test_a_latency_may_be_zero_and_nothing_else() -> None:
    assert quantity("0us", TIMES_S, may_be_zero=True) == 0.0
    with pytest.raises(ValueError):
        quantity("0us", TIMES_S)


@pytest.mark.parametrize(("text", "number"), [("5%", 0.05), ("0.05", 0.05), ("0", 0.0)])
def test_a_share_is_below_one(text: str, number: float) -> None:
    assert share(text) == number
    for refused in ("100%", "1", "-1%", "x", "nan"):
        with pytest.raises(ValueError):
            share(refused)


def test_a_whole_number_may_be_written_with_an_exponent() -> None:
    assert whole("1.28e6") == 1_280_000
    for refused in ("0", "1.5", "-3", "x", "inf", "nan", ""):
        with pytest.raises(ValueError):
            whole(refused)


@pytest.mark.parametrize(
    ("text", "numbers"),
    [
        ("1,32", (1, 32)),
        ("8, 2,1,2", (1, 2, 8)),
        ("1,2,4,…,64", (1, 2, 4, 8, 16, 32, 64)),
        ("1,2,4,...,50", (1, 2, 4, 8, 16, 32, 50)),
        ("1,2,3,…,6", (1, 2, 3, 4, 5, 6)),
        ("8,16,…,40", (8, 16, 32, 40)),
        ("1,32,64,…,256", (1, 32, 64, 128, 256)),
        ("8,16,24,…,40", (8, 16, 24, 32, 40)),
    ],
)
def test_dots_go_on_as_the_numbers_before_them_do(text: str, numbers: tuple[int, ...]) -> None:
    assert counts(text) == numbers


@pytest.mark.parametrize(
    "text",
    [
        "",
        "0",
        "1,x",
        "1,…",
        "…,4",
        "1,…,4",
        "4,2,…,8",
        "1,2,…,2",
        "1,2,…,4,8",
        "1,2,3,…,900",
        "2e5",
    ],
)
def test_what_is_no_list_of_workers_is_refused(text: str) -> None:
    with pytest.raises(ValueError):
        counts(text)
