"""Counts, sizes, times and shares are said in one way everywhere."""

import math

import pytest

from unisono.runtime.notices import amount, duration, percent, plural, size


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [
        (None, "–"),
        (math.nan, "–"),
        (-0.5, "–"),
        (math.inf, "–"),
        (0.0, "0 µs"),
        (0.0000123, "12 µs"),
        (0.0123, "12.3 ms"),
        (1.0, "1 s"),
        (59.9, "59.9 s"),
        (59.97, "1 min 0 s"),
        (61.4, "1 min 1 s"),
        (3600.0, "1 h 0 min"),
        (90_000.0, "1 d 1 h"),
    ],
)
def test_a_time_is_said_as_one_would(seconds, shown):
    assert duration(seconds) == shown


@pytest.mark.parametrize(
    ("number", "shown"),
    [
        (None, "–"),
        (math.nan, "NaN"),
        (-math.inf, "−∞"),
        (0.123456, "0.1235"),
        (1e-9, "1e-09"),
        (12345.6, "12\u202f346"),
        (1e300, "1e+300"),
    ],
)
def test_a_value_has_few_digits(number, shown):
    assert amount(number) == shown


@pytest.mark.parametrize(
    ("num_bytes", "shown"),
    [
        (None, "–"),
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1 KiB"),
        (299 * 2**20, "299 MiB"),
        (1023.9 * 2**20, "1 GiB"),
        (1.5 * 2**30, "1.5 GiB"),
        (24.04 * 2**30, "24 GiB"),
        (2**53, "8.19e+03 TiB"),
    ],
)
def test_a_size_is_binary_and_short(num_bytes, shown):
    assert size(num_bytes) == shown


def test_a_noun_goes_with_its_number():
    assert [plural(n, "step") for n in (0, 1, 2, 12345)] == [
        "0 steps",
        "1 step",
        "2 steps",
        "12\u202f345 steps",
    ]


def test_a_share_has_a_blank_before_its_sign():
    assert percent(0.284) == "28 %"
