"""Promise 1: the same bits on any number of workers."""

import itertools

import pytest
from tests.parity import cases
from tests.promises import promise

import unisono

SHARDS = (1, 3, 4, 8)
TWO_EPOCHS = 14  # each ends with a short batch


def digests_on(workers, wanted, steps=cases.STEPS):
    """Train every case on `workers` workers; all ranks must agree."""
    by_rank = unisono.launch(cases.train_all, wanted, steps, workers=workers)
    assert all(digests == by_rank[0] for digests in by_rank)
    return dict(zip(wanted, by_rank[0], strict=True))


def check_on(workers, wanted, steps=cases.STEPS):
    """See that every case has one digest, and another one than all others."""
    one = digests_on(1, wanted, steps)
    # Fused SGD may round as SGD does; all others are different computations.
    assert len(set(one.values())) >= len([case for case in wanted if case[1] != "fused sgd"])
    for count in workers:
        possible = [case for case in wanted if case[2] >= count]
        expected = {case: one[case] for case in possible}
        assert digests_on(count, possible, steps) == expected


def works(model, optimizer):
    # torch's fused SGD with momentum fails where a gradient comes later than others.
    return (model, optimizer) != ("sometimes unused", "fused sgd")


@promise("one-result.1")
@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "workers"),
    [
        ("cnn with norm and dropout", (3,)),
        pytest.param("cnn with norm and dropout", (2, 4), marks=pytest.mark.long),
        ("tied", (3,)),
        ("sometimes unused", (3,)),
    ],
)
def test_digest_is_the_same_on_any_number_of_workers(model, workers):
    # The sum over shards is finished before an optimizer sees it: each with two numbers is enough.
    turns = zip(cases.OPTIMIZERS, itertools.cycle((4, 3, 1)))
    wanted = [
        (model, optimizer, shards)
        for optimizer, turn in turns
        for shards in (8, turn)
        if works(model, optimizer)
    ]
    check_on(workers, wanted, TWO_EPOCHS)


@pytest.mark.long
@pytest.mark.timeout(300)
@pytest.mark.parametrize("model", cases.MODELS)
def test_digest_is_the_same_on_one_to_four_workers(model):
    every = itertools.product(cases.OPTIMIZERS, SHARDS)
    wanted = [(model, *case) for case in every if works(model, case[0])]
    check_on((2, 3, 4), wanted)


@pytest.mark.slow
def test_digest_is_the_same_with_every_optimizer_of_torch():
    wanted = [("cnn with norm and dropout", name, 4) for name in cases.OTHER_OPTIMIZERS]
    one = digests_on(1, wanted, TWO_EPOCHS)
    assert digests_on(3, wanted, TWO_EPOCHS) == one
