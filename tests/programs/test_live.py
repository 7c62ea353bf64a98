"""What the code of a program names and makes, as far as it can be seen without running it."""

import sys

import pytest

from unisono.programs.live import live_variables, orders_by_hash, takers_of


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("ids = {word: n for n, word in enumerate(set(words))}", True),
        ("def f(words):\n    return lambda: {w for w in words}", True),
        ("names = {first, second}", True),
        ("class A:\n    def seed(self):\n        return hash(self.name)", True),
        ("if name in {'a', 'b'}:\n    pass", False),
        ("kept = [n for n in range(9)]", False),
    ],
)
def test_code_that_makes_sets_or_asks_for_hashes_is_seen(source, expected):
    assert orders_by_hash(compile(source, "", "exec")) is expected


def _counts_errors():
    errors = 0
    while True:
        yield takers_of(sys._getframe())
        try:
            raise ValueError
        except ValueError:
            errors += 1


def test_what_only_a_handler_reads_is_needed():
    steps = _counts_errors()
    next(steps)
    assert live_variables(steps.gi_frame) == {"errors", "sys", "takers_of", "ValueError"}


def test_those_that_take_what_a_generator_yields_are_found():
    def takes():
        yield from _counts_errors()

    here = sys._getframe()
    assert [one.f_code for one in next(takes())] == [takes.__code__, here.f_code]
    assert takers_of(here) == []
