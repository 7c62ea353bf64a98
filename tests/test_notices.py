"""What is said to the user never ends a program; counts, sizes and times are said in one way."""

import errno
import io
import math
import os
import sys

import pytest

from unisono.runtime.notices import amount, decimal, duration, plural, say, shown, size


class Stream(io.StringIO):
    def __init__(self, code=0, is_terminal=False):
        super().__init__()
        self._code, self._is_terminal = code, is_terminal

    def write(self, text):
        if self._code:
            raise OSError(self._code, os.strerror(self._code))
        return super().write(text)

    def isatty(self):
        return self._is_terminal


@pytest.mark.parametrize(
    ("is_terminal", "text"), [(False, "unisono: a line\n"), (True, "\r\x1b[2Kunisono: a line\n")]
)
def test_a_line_is_a_line_of_its_own(monkeypatch, is_terminal, text):
    monkeypatch.setattr(sys, "stderr", Stream(is_terminal=is_terminal))
    say("a line")
    assert sys.stderr.getvalue() == text


def closed():
    stream = io.StringIO()
    stream.close()
    return stream


class Odd:
    """What a program may put in the place of standard error: no more than `write`."""

    def __init__(self, error=None):
        self._error, self.text = error, ""

    def write(self, text):
        if self._error is not None:
            raise self._error
        self.text += text


@pytest.mark.parametrize(
    "stream",
    [
        lambda: Stream(errno.ENOSPC),
        lambda: Stream(errno.EPIPE),
        closed,
        lambda: None,
        lambda: Odd(RuntimeError("lost sys.stderr")),
    ],
)
def test_where_nobody_takes_it_nothing_happens(monkeypatch, stream):
    monkeypatch.setattr(sys, "stderr", stream())
    say("a line")


def test_a_line_cannot_steer_the_terminal(monkeypatch):
    stream = Stream()
    monkeypatch.setattr(sys, "stderr", stream)
    say("runs/\x1b[2J\r\x07 is full\nand more")
    assert stream.getvalue() == "unisono: runs/\\x1b[2J\\r\\x07 is full\nand more\n"


@pytest.mark.parametrize(
    ("name", "seen"),
    [
        ("layer.weight", "layer.weight"),
        ("Gewicht ä 重み", "Gewicht ä 重み"),
        ("a\nb\tc\0", r"a\nb\tc\x00"),
        ("\x1b[31m\x9b", r"\x1b[31m\x9b"),
        ("\u202eabc\u2028", r"\u202eabc\u2028"),
        ("\udcff\ud800", r"\udcff\ud800"),
        ("x" * 300, "x" * 199 + "…"),
        ("", ""),
    ],
)
def test_a_name_of_others_is_written_out(name, seen):
    assert shown(name) == seen


def test_a_stream_that_can_only_be_written_to_gets_the_line(monkeypatch):
    monkeypatch.setattr(sys, "stderr", Odd())
    say("a line")
    assert sys.stderr.text == "unisono: a line\n"


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [
        (None, "–"),
        (math.nan, "–"),
        (-0.5, "–"),
        (0.0, "0 µs"),
        (0.0000123, "12 µs"),
        (0.0123, "12.3 ms"),
        (1.0, "1 s"),
        (59.9, "59.9 s"),
        (59.97, "1 min 0 s"),
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
    ("number", "shown"),
    [
        (0.0, "0.0000"),
        (0.31494, "0.3149"),
        (-2.5, "-2.5000"),
        (1.9547e-08, "1.955e-08"),
        (-1.5e30, "-1.5e+30"),
        (math.nan, "nan"),
        (-math.inf, "-inf"),
    ],
)
def test_a_mean_shows_digits_of_every_size(number, shown):
    assert decimal(number) == shown


@pytest.mark.parametrize(
    ("num_bytes", "shown"),
    [
        (None, "–"),
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1 KiB"),
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
