import math

import pytest
from tests.verify.made import ALONE, ran

from unisono.tools.verify.bit_checks import check_exact, check_states
from unisono.tools.verify.findings import in_order
from unisono.tools.verify.trace import ModelState, OptimizerStep, TwoRuns


def run(world_size, changes=()):
    """Make a run of two steps and two shards; `changes` replace some digests."""
    made = {}
    for step in range(2):
        for shard in range(2):
            made[step, "samples", shard] = {"the batch": f"samples {step} {shard}"}
            made[step, "gradients", shard] = {"w": f"gradient {step} {shard}"}
        for rank in range(world_size):
            made[step, "parameters", rank] = {"w": f"w {step}"}
            made[step, "buffers", rank] = {"mean": f"mean {step}"}
    return made | dict(changes)


def first(runs):
    found = in_order(check_exact(runs))[0]
    return found.check, found.verdict, found.evidence


def test_equal_runs_are_equal_in_all_checks():
    found = check_exact({size: run(size) for size in (1, 2, 3)})
    assert {finding.verdict for finding in found} == {"ok"}
    # Of these nothing is recorded.
    assert not [finding for finding in found if finding.check.startswith("evaluation-")]
    assert "2 shards" in found[0].evidence
    assert "1, 2, 3 workers in 2 steps" in found[0].evidence


@pytest.mark.parametrize(
    ("changes", "check", "words"),
    [
        ({(1, "samples", 0): {"the batch": "x"}}, "samples-lost", "Step 1, shard 0"),
        ({(0, "gradients", 1): {"w": "x"}}, "gradients-not-averaged", "gradient of `w` on 2"),
        ({(0, "gradients", 1): {}}, "gradients-not-averaged", "gradient of `w` on 2"),
        (
            {(1, "parameters", 1): {"w": "x"}},
            "parameters-differ",
            "worker 1 of 2 has other parameters",
        ),
        ({(0, "buffers", n): {"mean": "x"} for n in (0, 1)}, "buffers-differ", "first is `mean`"),
        # Of two differences the earlier one is the cause.
        (
            {(1, "samples", 1): {"the batch": "x"}, (0, "gradients", 0): {"w": "x"}},
            "gradients-not-averaged",
            "Step 0, shard 0",
        ),
    ],
)
def test_the_first_difference_is_named(changes, check, words):
    found, verdict, evidence = first({1: run(1), 2: run(2, changes)})
    assert (found, verdict) == (check, "wrong")
    assert words in evidence


@pytest.mark.parametrize(("ended", "is_found"), [(1, True), (2, False)])
def test_a_run_that_ends_earlier_than_on_one_worker_is_found(ended, is_found):
    longer = run(1) | {(2, "parameters", 0): {"w": "w 2"}}
    runs = {1: longer, 2: run(2)}
    runs[3 - ended][0, "end", 0] = {}
    found = {finding.check: finding for finding in check_exact(runs)}
    assert (found["samples-lost"].verdict == "wrong") == is_found
    assert not is_found or found["samples-lost"].evidence == "2 ranks took 2 steps, and one rank 3."


def test_runs_without_a_common_step_say_nothing():
    assert first({1: run(1), 2: {}})[1] == "unknown"


def trace(lrs=(0.1,) * 12, *, ticks=1, **fields):
    return ran(
        *(OptimizerStep(number=at, lr=(lr,), ticks=ticks, **fields) for at, lr in enumerate(lrs))
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
        return ran(
            *(
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
