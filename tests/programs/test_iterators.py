"""Iterators and counters: what they would be rebuilt from, and whether they have moved."""

import itertools
import operator
from fractions import Fraction

import numpy as np
import pytest

from unisono.programs import iterators
from unisono.programs.iterators import parts_of, reduced


@pytest.fixture
def nothing_rebuilt(monkeypatch):
    def refuse(value):
        raise TypeError(f"cannot pickle {value!r}")

    monkeypatch.setattr(iterators, "reduced", refuse)


MADE = {
    "count": lambda: itertools.count(5, 2),
    "count of floats": lambda: itertools.count(0.5, 0.25),
    "repeat": lambda: itertools.repeat("a", 9),
    "islice": lambda: itertools.islice(range(20), 1, 19, 2),
    "accumulate": lambda: itertools.accumulate(range(1, 9)),
    "combinations": lambda: itertools.combinations(range(9), 2),
    "enumerate": lambda: enumerate("abcdefgh"),
    "list": lambda: iter([1, 2, 3, 4]),
}


@pytest.mark.parametrize("make", MADE.values(), ids=MADE)
def test_whatever_an_iterator_gives_moves_it_even_if_it_cannot_be_rebuilt(make, nothing_rebuilt):
    iterator = make()
    seen = [parts_of(iterator)]
    assert parts_of(iterator) == seen[0]
    for _ in range(3):
        next(iterator)
        seen.append(parts_of(iterator))
    assert all(map(operator.ne, seen, seen[1:]))


def test_a_cycle_that_cannot_be_rebuilt_moves_in_its_second_round(nothing_rebuilt):
    cycle = itertools.cycle("ab")
    for _ in range(3):
        next(cycle)
    seen = parts_of(cycle)
    next(cycle)
    assert parts_of(cycle) != seen


@pytest.mark.parametrize("arguments", [(5,), (-3, 2), (0.5, 0.25), (2**70, 3)])
def test_a_counter_tells_with_which_numbers_to_make_it(arguments):
    counter = itertools.count(*arguments)
    next(counter)
    now = next(counter)
    made = iterators._arguments_of(counter)
    assert next(itertools.count(*made)) == now + (now - arguments[0])


@pytest.mark.parametrize("step", [Fraction(1, 3), np.int64(2)])
def test_a_counter_of_other_numbers_cannot_be_rebuilt_from_its_text(step):
    with pytest.raises(TypeError, match="does not consist of numbers"):
        iterators._arguments_of(itertools.count(step, step))


def test_a_counter_is_rebuilt_on_every_python():
    counter = itertools.count(7)
    make, arguments, *_ = reduced(counter)
    assert next(make(*arguments)) == 7
