"""What the code of a program names and makes, as far as it can be seen without running it."""

import sys

import pytest

from unisono.programs.live import (
    iterators_around,
    live_variables,
    orders_by_hash,
    takers_of,
    takes_in_a_loop,
)


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


def _stores_and_reads(kept):
    yield
    return [kept for _ in range(2)]


def test_a_variable_that_is_read_where_another_is_set_is_needed():
    steps = _stores_and_reads([])
    next(steps)  # one instruction does both since Python 3.13
    assert "kept" in live_variables(steps.gi_frame)


def _steps(seen):
    for _ in range(3):
        seen.append(takes_in_a_loop(sys._getframe(1)))
        yield {"rows": [1]}


def _listed(steps):
    return [step for step in steps]  # noqa: C416


def _mapped(steps):
    return {n: row for step in steps for n, row in enumerate(step["rows"])}


@pytest.mark.parametrize("take", [_listed, _mapped])
def test_comprehensions_that_take_steps_are_told_from_loops(take):
    seen = []
    take(_steps(seen))
    assert seen == [False, False, False]


def test_loops_that_contain_comprehensions_are_loops():
    seen = []
    for step in _steps(seen):
        rows = [*step["rows"], *[row for row in step["rows"] if row]]
        assert [[n + row for n in range(2)] for row in rows]
    assert seen == [True, True, True]


def test_iterators_around_are_named_and_an_end_is_found():
    steps = _steps([])
    counted = enumerate(steps)
    assert iterators_around(steps) == ["enumerate"]
    assert next(counted)[0] == 0


def test_what_others_may_read_after_the_end_is_needed():
    last = best = 0.0

    def train():
        nonlocal last, best
        best = 0.0
        yield
        last = best = 1.0
        yield last

    steps = train()
    next(steps)
    assert live_variables(steps.gi_frame) == set()
    next(steps)
    assert live_variables(steps.gi_frame) == {"last", "best"}
