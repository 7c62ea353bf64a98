import math

import pytest

from unisono.tools.verify.bit_checks import check_states
from unisono.tools.verify.trace import ModelState, OptimizerStep, RankTrace, TwoRuns

ALONE = RankTrace()  # one rank that did nothing


def trace(lrs=(0.1,) * 12, *, ticks=1, **fields):
    return RankTrace(
        steps=tuple(
            OptimizerStep(number=at, lr=(lr,), ticks=ticks, **fields) for at, lr in enumerate(lrs)
        )
    )


def verdicts(ranks, one=ALONE):
    return {f.check: f.verdict for f in check_states(TwoRuns(tuple(ranks), one))}


def cosine(length, num=20):
    return tuple(0.1 * (1 + math.cos(math.pi * at / length)) / 2 for at in range(num))


def halved(every, num=20):
    return tuple(0.1 * 0.5 ** (at // every) for at in range(num))


def linear(length, num=20):
    return tuple(0.1 * at / length for at in range(1, num + 1))


@pytest.mark.parametrize(
    ("mine", "ones", "ticks", "scaled", "fast"),
    [
        ((0.1,) * 20, (0.1,) * 20, 1, "ok", "ok"),
        ((0.2,) * 20, (0.1,) * 20, 1, "wrong", "ok"),
        (tuple(2 * lr for lr in cosine(20)), cosine(20), 1, "wrong", "ok"),
        (cosine(20), cosine(20), 1, "ok", "ok"),
        (cosine(10), cosine(20), 1, "ok", "wrong"),
        (cosine(10), cosine(21), 1, "ok", "wrong"),  # 2.1 times
        (halved(5), halved(10), 1, "ok", "wrong"),
        # A warm-up in batches of one rank is Accelerate's way.
        (linear(10), linear(20), 2, "unknown", "unknown"),
        (halved(10), halved(5), 1, "ok", "unknown"),  # slower
    ],
)
def test_learning_rates(mine, ones, ticks, scaled, fast):
    ranks = [trace(mine, ticks=ticks)] * 2
    found = verdicts(ranks, trace(ones))
    assert (found["learning-rate-scaled"], found["schedule-too-fast"]) == (scaled, fast)


def with_states(*states):
    return [trace((0.1,), state=state) for state in states]


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (("parameters", ({"w": "1"}, {"w": "1"})), "unknown"),  # nobody to compare with
        (("parameters", ({"w": "1"}, {"w": "2"})), "wrong"),
        (("buffers", ({"mean": "1"}, {"mean": "1"})), "ok"),
        (("buffers", ({"mean": "1"}, {"mean": "2"})), "wrong"),
        (("buffers", ({}, {})), "ok"),
    ],
)
def test_replicas(names, expected):
    kind, (first, second) = names
    ranks = with_states(ModelState(**{kind: first}), ModelState(**{kind: second}))
    assert verdicts(ranks)[f"{kind}-differ"] == expected


@pytest.mark.parametrize(
    ("theirs", "expected"), [((1.0, 2.0), "ok"), ((1.0, 2.00001), "ok"), ((1.0, 1.0), "unknown")]
)
def test_parameters_of_one_rank_are_as_near_as_rounding_or_unknown(theirs, expected):
    def moved(*ends):
        state = ModelState({"w": "same"})
        return RankTrace(
            steps=tuple(
                OptimizerStep(number=n, lr=(0.1,), parameters={"w": end}, state=state)
                for n, end in enumerate(ends)
            )
        )

    ranks = [moved((0.0, 0.0), (1.0, 2.0))] * 2
    assert verdicts(ranks, moved((0.0, 0.0), theirs))["parameters-differ"] == expected


@pytest.mark.parametrize(
    ("draws", "rngs", "expected"),
    [(True, ("1", "1"), "wrong"), (True, ("1", "2"), "ok"), (False, ("1", "1"), "ok")],
)
def test_random_numbers_of_forward_passes(draws, rngs, expected):
    ranks = [trace((0.1,), state=ModelState(rng=rng), draws=draws) for rng in rngs]
    assert verdicts(ranks)["randomness-same-on-all-ranks"] == expected
