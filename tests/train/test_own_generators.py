"""Generators that belong to a data set, a loss or a model are seeded as the default ones are."""

import random
import types

import numpy as np
import pytest
import torch
from tests.promises import promise
from tests.train import drawing

import unisono
from unisono.programs.generators import OwnGenerators
from unisono.programs.walk import Walk


@promise("one-result.9")
@pytest.mark.slow
@pytest.mark.parametrize("named", [False, True])
def test_a_loop_of_ones_own_comes_to_the_same(named):
    alone = drawing.own_loop(named)
    assert unisono.launch(drawing.own_loop, named, workers=3) == [alone] * 3


# What is found


class Slotted:
    __slots__ = ("__hidden", "rng")

    def __init__(self):
        self.rng = random.Random(0)
        self.__hidden = torch.Generator()


class Treacherous:
    """Whoever asks it anything runs its code."""

    def __init__(self):
        self.rng = np.random.default_rng(0)

    def __getattr__(self, name):
        raise AssertionError(name)

    def __bool__(self):
        raise AssertionError

    def __len__(self):
        raise AssertionError

    def __eq__(self, other):
        raise AssertionError

    __hash__ = None

    @property
    def other(self):
        raise AssertionError


def found(**roots):
    return sorted(Walk(roots).generators)


def test_generators_are_named_by_the_way_to_them():
    assert found(a=Slotted()) == ["a._Slotted__hidden", "a.rng"]
    assert found(a=types.SimpleNamespace(steps=[1, {"x": Slotted()}]))[-1] == "a.steps[1]['x'].rng"
    assert found(a=lambda: drawing.GLOBAL) == ["a.drawing.GLOBAL"]
    assert found(a=drawing.losing()) == ["a.GLOBAL", "a.generator"]


def test_no_code_of_the_program_runs_on_the_way():
    assert found(a=[Treacherous()]) == ["a[0].rng"]


@pytest.mark.slow
def test_what_leads_in_a_circle_or_is_long_is_done_with_soon():
    circle = [Slotted()]
    circle.append(circle)
    assert found(a=circle)[:2] == ["a[0]._Slotted__hidden", "a[0].rng"]
    assert len(found(a=[Slotted()] * 1_000)) == 2
    assert found(a=[[Slotted() for _ in range(100)] for _ in range(400)]) == []  # near things first


def test_the_default_generators_and_systems_randomness_are_left_out():
    defaults = [random._inst, np.random.mtrand._rand, torch.default_generator, np.random.rand]
    assert found(a=defaults, b=random.SystemRandom(), c=random.random) == []


MAKERS = [
    lambda: random.Random(3),
    lambda: np.random.default_rng(3),
    lambda: np.random.RandomState(3),
    lambda: np.random.Philox(3),
    lambda: torch.Generator().manual_seed(3),
]


def drawn(each):
    if isinstance(each, torch.Generator):
        return torch.rand(3, generator=each).tolist()
    if isinstance(each, np.random.BitGenerator):
        return each.random_raw(3).tolist()
    return [each.random() for _ in range(3)]


@promise("one-result.9")
@pytest.mark.parametrize("make", MAKERS)
def test_each_kind_is_seeded_and_put_back(make):
    one, other = make(), make()
    own = OwnGenerators(a=one, b=other)
    own.look()
    with own.put_back():
        own.seed(2**60 + 1)
        first = drawn(one)
        assert first != drawn(other)  # each has numbers of its own
        own.seed(2**60 + 2)
        assert drawn(one) != first
        own.seed(2**60 + 1)
        assert drawn(one) == first
    assert drawn(one) == drawn(make())


def test_a_loop_leaves_the_generators_as_they_were():
    dataset, _, loss = drawing.PROGRAMS["loss"]()
    own = OwnGenerators(dataset=dataset, loss=loss)
    own.look()
    before = [str(state) for state in own.states()]
    drawing.PROGRAMS["here"] = lambda: (dataset, {}, loss)
    try:
        drawing.train("here", steps=2)
    finally:
        del drawing.PROGRAMS["here"]
    assert [str(state) for state in own.states()] == before
    assert len(before) == 5
