"""Generators that belong to a data set, a loss or a model are seeded as the default ones are."""

import random
import types

import numpy as np
import pytest
import torch
from tests.classified import at_random
from tests.promises import promise
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

import unisono
from unisono.programs.generators import OwnGenerators
from unisono.programs.walk import Walk

GLOBAL = np.random.default_rng(5)
elsewhere = types.ModuleType(__name__)  # as another module of the program
elsewhere.RNG = np.random.default_rng(6)


def losing():
    generator = torch.Generator().manual_seed(7)

    def loss(model, batch):
        inputs = batch[0] + 0.1 * torch.randn(batch[0].shape, generator=generator)
        return cross_entropy(model(inputs), batch[1]) * GLOBAL.uniform(0.5, 1.5)

    return loss


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
    assert found(a=lambda: elsewhere.RNG) == ["a.elsewhere.RNG"]
    assert found(a=losing()) == ["a.GLOBAL", "a.generator"]


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
    own.search()
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
    class Drawing(TensorDataset):
        rngs = random.Random(0), np.random.default_rng(0), torch.Generator()

        def __getitem__(self, index):
            inputs, label = super().__getitem__(index)
            return inputs * sum(float(drawn(one)[0]) for one in self.rngs), label

    dataset, loss = Drawing(*at_random(22, 8, 4, seed=3).tensors), losing()
    own = OwnGenerators(dataset=dataset, loss=loss)
    own.search()
    before = [str(state) for state in own.states()]
    model = torch.nn.Linear(8, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    trainer = unisono.Trainer(model, optimizer, loss, shards=4)
    trainer.fit(dataset, batch_size=6, steps=2)
    assert [str(state) for state in own.states()] == before
    assert len(before) == 5
