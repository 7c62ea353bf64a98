import pytest
from tests.verify.made import ALONE, LOCAL, gradient, mixed, ran, step, two_ranks

from unisono.tools.verify.digests import relation, tolerance, weights
from unisono.tools.verify.findings import GRADIENT_CHECKS
from unisono.tools.verify.gradient_checks import check_gradients
from unisono.tools.verify.trace import Forward, ModelState, OptimizerStep, TwoRuns

MEAN = mixed((0.5, 0.5))
SUM = mixed((1.0, 1.0))


def wrong_ones(seen):
    return [finding.check for finding in check_gradients(seen) if finding.verdict == "wrong"]


def verdicts(seen):
    return {finding.check: finding.verdict for finding in check_gradients(seen)}


def each_rank(make):
    """Make two ranks, each with the step that `make` gives for its number."""
    return [ran(make(rank), rank=rank) for rank in range(2)]


def test_every_check_gets_one_finding():
    found = check_gradients(two_ranks((MEAN, MEAN)))
    assert tuple(finding.check for finding in found) == tuple(GRADIENT_CHECKS)


@pytest.mark.parametrize(
    ("finals", "ones", "samples", "expected"),
    [
        # (each rank's gradient, one rank's, samples of ranks, first mistake)
        ((MEAN, MEAN), MEAN, ("ab", "cd"), []),
        ((SUM, SUM), SUM, ("ab", "cd"), []),  # the loss is divided by all
        ((SUM, SUM), MEAN, ("ab", "cd"), ["gradient-times-n"]),
        ((mixed((2, 2)), mixed((2, 2))), MEAN, ("ab", "cd"), ["gradient-times-n"]),
        ((mixed((0.25, 0.25)),) * 2, MEAN, ("ab", "cd"), ["gradient-over-n"]),
        (LOCAL, MEAN, ("ab", "cd"), ["gradients-not-averaged"]),
        ((MEAN, MEAN), mixed((0.75, 0.25)), ("abe", "c"), ["mean-of-means"]),
        ((MEAN, MEAN), mixed((0.75, 0.25)), ("ab", "cd"), ["weights-of-tokens"]),
        # Uneven, but weighed as one rank does.
        ((mixed((0.75, 0.25)),) * 2, mixed((0.75, 0.25)), ("abe", "c"), []),
        # A factor that is no power of N is not explained.
        ((mixed((0.35, 0.35)),) * 2, MEAN, ("ab", "cd"), []),
    ],
)
def test_the_first_mistake_is_read_off_the_gradients(finals, ones, samples, expected):
    seen = two_ranks(finals, ones, samples=samples)
    assert wrong_ones(seen) == expected


@pytest.mark.parametrize("apart", [0.0, 1e-7, 1e-5])
def test_rounding_is_no_difference(apart):
    ones = tuple(value * (1 + apart * (-1) ** at) for at, value in enumerate(MEAN))
    assert set(verdicts(two_ranks((MEAN, MEAN), ones)).values()) == {"ok"}


def test_rounding_is_larger_in_bfloat16_and_after_many_steps():
    assert tolerance("float64", 100, 0) < tolerance("float32", 100, 0) < 1e-3
    assert tolerance("float32", 100, 0) < tolerance("float32", 100, 10) < 1e-2
    assert tolerance("bfloat16", 100, 0) == 0.1


def test_other_samples_say_nothing_about_weights():
    seen = two_ranks((MEAN, MEAN), mixed((0.9, 0.1)))
    others = ran(step(seen.one.of(OptimizerStep)[0].gradients, "xyzu"))
    found = verdicts(TwoRuns(seen.ranks, others))
    assert found["weights-of-tokens"] == found["gradient-times-n"] == "unknown"
    assert found["gradients-not-averaged"] == "ok"


def test_other_parameters_at_the_start_say_nothing():
    seen = two_ranks((SUM, SUM), MEAN)
    one = ran(step(seen.one.of(OptimizerStep)[0].gradients, "abcd", state=ModelState({"w": "x"})))
    assert wrong_ones(TwoRuns(seen.ranks, one)) == []


def test_without_one_rank_averaging_is_seen_and_nothing_else():
    found = verdicts(two_ranks((MEAN, MEAN)))
    assert found["gradients-not-averaged"] == "ok"
    assert found["gradient-times-n"] == "unknown"


def test_batch_norm_leaves_a_factor_of_n_visible_and_nothing_smaller():
    state = ModelState({"w": "start"}, has_batch_norm=True)
    near = tuple(value * (1 + 0.05 * (-1) ** at) for at, value in enumerate(MEAN))
    twice = two_ranks((SUM, SUM), near, state=state)
    once = two_ranks((MEAN, MEAN), near, state=state)
    assert wrong_ones(twice) == ["gradient-times-n"]
    assert wrong_ones(once) == []
    assert "batch norm" in next(f for f in check_gradients(once) if f.verdict == "unknown").evidence


def test_one_parameter_that_is_left_out_is_named():
    def make(rank):
        own = gradient(LOCAL[rank], LOCAL[rank])
        return step({"body": gradient(MEAN, LOCAL[rank]), "head.bias": own})

    ranks = each_rank(make)
    (finding,) = [f for f in check_gradients(TwoRuns(ranks, ALONE)) if f.verdict == "wrong"]
    assert finding.check == "parameter-not-averaged"
    assert "`head.bias`" in finding.evidence


@pytest.mark.parametrize(
    ("finals", "no_sync", "expected"),
    [
        # Two passes a rank, each as in LOCAL.
        ((mixed((2, 0)), mixed((0, 2))), True, ["accumulation-not-synced"]),
        ((mixed((1.5, 0.5)), mixed((0.5, 1.5))), False, ["accumulation-not-synced"]),
        ((mixed((2, 0)), mixed((0, 2))), False, ["gradients-not-averaged"]),
    ],
)
def test_accumulated_passes_that_are_not_all_averaged(finals, no_sync, expected):
    def make(rank):
        gradients = {"w": gradient(finals[rank], LOCAL[rank], LOCAL[rank])}
        passes = (Forward(samples="a"), Forward(samples="b"))
        return OptimizerStep(gradients=gradients, passes=passes, no_sync=no_sync)

    assert wrong_ones(TwoRuns(each_rank(make), ALONE)) == expected


def test_clipping_own_gradients_is_named_even_if_it_changes_nothing():
    ranks = each_rank(lambda n: step({"w": gradient(MEAN, LOCAL[n], clipped=LOCAL[n])}))
    assert wrong_ones(TwoRuns(ranks, ALONE)) == ["clip-before-average"]


def test_clipping_the_average_is_right():
    clipped = mixed((0.1, 0.1))
    ranks = each_rank(lambda n: step({"w": gradient(clipped, LOCAL[n], clipped=MEAN)}, "ab"))
    one = ran(step({"w": gradient(mixed((0.2, 0.2)), MEAN, clipped=MEAN)}, "ab"))
    assert set(verdicts(TwoRuns(ranks, one)).values()) == {"ok"}


def test_averaged_parameters_take_the_place_of_averaged_gradients():
    def rank(number):
        after = {"w": (float(number),)}
        first = step({"w": gradient(LOCAL[number], LOCAL[number])}, parameters=after)
        second = step(
            {"w": gradient(LOCAL[number], LOCAL[number])}, number=1, state=ModelState({"w": "mean"})
        )
        return ran(first, second, rank=number)

    found = verdicts(TwoRuns((rank(0), rank(1)), ALONE))
    assert found["gradients-not-averaged"] == "unknown"
    first_alone = TwoRuns([ran(*rank(n).of(OptimizerStep)[:1]) for n in range(2)], ALONE)
    assert verdicts(first_alone)["gradients-not-averaged"] == "wrong"


def test_a_parameter_that_no_module_has_is_not_thought_to_be_averaged_later():
    def rank(number):
        after = {"w": (1.0,), "bias": (float(number),)}
        gradients = {
            "w": gradient(MEAN, LOCAL[number]),
            "bias": gradient(LOCAL[number], LOCAL[number]),
        }
        later = ModelState({"w": "same"})
        steps = [step(gradients, number=n, parameters=after, state=later) for n in range(2)]
        return ran(*steps, rank=number)

    assert wrong_ones(TwoRuns((rank(0), rank(1)), ALONE)) == ["parameter-not-averaged"]


def test_ranks_that_update_different_parameters_are_not_judged():
    ranks = each_rank(lambda n: step({f"w{n}": gradient(LOCAL[n], LOCAL[n])}))
    assert set(verdicts(TwoRuns(ranks, ALONE)).values()) == {"unknown"}


def test_relations_and_weights():
    import numpy as np

    x, y = np.array([2.0, 4.0]), np.array([1.0, 2.0])
    assert relation(x, y).factor == pytest.approx(2)
    assert relation(x, y).rest == pytest.approx(0)
    assert relation(np.zeros(2), np.zeros(2)).rest == 0
    found, rest = weights(np.array(mixed((0.3, 0.7))), [np.array(v) for v in LOCAL])
    assert found == pytest.approx([0.3, 0.7])
    assert rest < 1e-12
