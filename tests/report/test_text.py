"""How numbers, times and other people's words are shown."""

import math

import pytest

from unisono.report import text


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
    assert text.duration(seconds) == shown


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
    assert text.amount(number) == shown


@pytest.mark.parametrize(
    ("unix_s", "shown"), [(0.0, "1970-01-01 00:00:00 UTC"), (1e12, "–"), (-1e12, "–"), (None, "–")]
)
def test_a_moment_that_no_calendar_has_is_not_shown(unix_s, shown):
    assert text.moment(unix_s) == shown


@pytest.mark.parametrize(
    ("found", "shown"),
    [
        ("a<b", "a<b"),
        ("\x1b[31m", "\\x1b[31m"),
        ("a\u202eb", "a\\u202eb"),
        ("a\nb", "a\nb"),
        ("x" * 3000, "x" * 1999 + "…"),
        ("naïve 日本 😀", "naïve 日本 😀"),
    ],
)
def test_nothing_is_hidden_in_text(found, shown):
    assert text.plain(found) == shown


def test_text_is_escaped_for_where_it_goes():
    assert text.in_page("<b>\"'&") == "&lt;b&gt;&quot;&#x27;&amp;"
    assert text.in_plot("<b>\n&") == "&lt;b&gt; &amp;"


@pytest.mark.parametrize(
    ("found", "shown"), [(True, "yes"), (None, "none"), (3, "3"), ([1, "é"], '[1, "é"]'), ("", "")]
)
def test_a_value_is_shown_in_few_words(found, shown):
    assert text.value(found) == shown
