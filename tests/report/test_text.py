"""How other people's words are shown."""

import pytest

from unisono.tools.report import text


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


def test_a_name_is_escaped_for_a_plot():
    assert text.in_plot("<b>\n&") == "&lt;b&gt; &amp;"


@pytest.mark.parametrize(
    ("found", "shown"), [(True, "yes"), (None, "none"), (3, "3"), ([1, "é"], '[1, "é"]'), ("", "")]
)
def test_a_value_is_shown_in_few_words(found, shown):
    assert text.value(found) == shown
