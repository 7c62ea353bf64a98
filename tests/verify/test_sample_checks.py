import pytest
from tests.verify.made import ALONE, ran

from unisono.tools.verify.findings import ok, unknown
from unisono.tools.verify.sample_checks import check_samples, with_numbers_of_steps
from unisono.tools.verify.trace import (
    Collective,
    EvaluationPass,
    Forward,
    Iteration,
    OptimizerStep,
    TwoRuns,
)


def step(number=0, samples=(), rows=()):
    """Make a step of one pass."""
    return OptimizerStep(number=number, passes=[Forward(samples=samples, rows=rows)])


def trace(plan, *more, orders=("one", "two"), role="train", how="ended", **fields):
    """Make a rank that reads `plan` in each of two epochs, two samples a step."""
    steps = [step(at // 2, plan[at : at + 2]) for at in range(0, len(plan), 2)]
    iterations = [
        Iteration(epoch=epoch, role=role, plan=plan, order=order, **fields)
        for epoch, order in enumerate(orders)
    ]
    return ran(*more, *steps, *iterations, how=how)


def verdicts(ranks, one=ALONE):
    found = check_samples(TwoRuns(tuple(ranks), one))
    return {finding.check: finding.verdict for finding in found}


@pytest.mark.parametrize(
    ("plans", "expected"),
    [
        (("abcd", "efgh"), "ok"),
        (("abcd", "efga"), "ok"),  # one is repeated, so that ranks have equally many
        (("abcd", "abcd"), "wrong"),
        (("abcd", "cdab"), "wrong"),  # each reads everything, in an order of its own
        (("aa", "bb"), "ok"),
    ],
)
def test_samples_of_ranks(plans, expected):
    assert verdicts([trace(plan) for plan in plans])["samples-same-on-all-ranks"] == expected


@pytest.mark.parametrize("fields", [{"replaces": True}, {"is_sliced": True}])
def test_reading_all_is_right_where_it_is_drawn_or_sliced(fields):
    ranks = [trace("abcd", **fields), trace("badc", **fields)]
    ranks[1] = ran(*(step(n, (f"other {n}",)) for n in range(2)), *ranks[1].of(Iteration))
    assert verdicts(ranks)["samples-same-on-all-ranks"] == "ok"


@pytest.mark.parametrize(
    ("fields", "one", "expected"),
    [
        ({"has_set_epoch": True}, ALONE, "wrong"),
        ({"has_set_epoch": True, "is_sorted": True}, ALONE, "ok"),
        ({}, ALONE, "ok"),  # an order of the program's own
        ({}, trace("abcd", orders=("one", "two")), "wrong"),  # which changes on one rank
        ({}, trace("abcd", orders=("one", "one")), "ok"),
    ],
)
def test_an_order_that_is_the_same_in_two_epochs(fields, one, expected):
    ranks = [trace(plan, orders=("one", "one"), **fields) for plan in ("abcd", "efgh")]
    assert verdicts(ranks, one)["epoch-order-fixed"] == expected


def test_an_order_that_changes_and_one_that_was_seen_once():
    ranks = [trace("abcd", has_set_epoch=True), trace("efgh", has_set_epoch=True)]
    assert verdicts(ranks)["epoch-order-fixed"] == "ok"
    stopped = [ran(*rank.of(Iteration)[:1], how="stopped") for rank in ranks]
    assert verdicts(stopped)["epoch-order-fixed"] == "unknown"


@pytest.mark.parametrize(
    ("plans", "one", "fields", "expected"),
    [
        (("ab", "cd"), "abcd", {}, "ok"),
        (("ab", "cd"), "abcde", {}, "wrong"),
        (("ab", "cd"), "abcde", {"drop_last": True}, "ok"),
        (("ab", "cd"), "abcde", {"replaces": True}, "ok"),
        (("abc", "dea"), "abcde", {}, "ok"),
        (("ab", "cd"), None, {}, "unknown"),
    ],
)
def test_samples_that_are_left_out(plans, one, fields, expected):
    alone = ALONE if one is None else trace(one, **fields)
    assert verdicts([trace(p, **fields) for p in plans], alone)["samples-lost"] == expected


@pytest.mark.parametrize(
    ("trained", "validated", "expected"),
    [
        (("ab", "cd"), ("xy", "xy"), "ok"),
        (("ab", "cd"), ("xc", "ya"), "wrong"),
        (("ab", "cd"), ("a", "c"), "ok"),  # on purpose
        (("ab", "cd"), ("", ""), "ok"),
    ],
)
def test_ranks_that_split_the_data_differently(trained, validated, expected):
    ranks = [
        ran(Iteration(plan=train), Iteration(loader=1, role="eval", plan=valid))
        for train, valid in zip(trained, validated, strict=True)
    ]
    assert verdicts(ranks)["split-differs"] == expected


def test_a_split_is_seen_in_what_the_model_is_given_too():
    ranks = [
        ran(step(0, "?", train), EvaluationPass(samples="?", rows=valid))
        for train, valid in (("a", "b"), ("b", "c"))
    ]
    assert verdicts(ranks)["split-differs"] == "wrong"


@pytest.mark.parametrize(
    ("given", "one", "how", "expected"),
    [
        (("ab", "cd"), "abcd", "ended", "ok"),
        (("ab", "cd"), "abcde", "ended", "wrong"),
        (("ab", "cx"), "abcde", "ended", "unknown"),  # they were changed on the way
        (("ab", "cd"), "abcde", "stopped", "unknown"),
    ],
)
def test_samples_that_no_loader_gives_are_counted_by_what_the_model_gets(given, one, how, expected):
    def rank(rows):
        return ran(step(0, rows, rows), how=how)

    assert verdicts([*map(rank, given)], rank(one))["samples-lost"] == expected


@pytest.mark.parametrize(
    ("left", "of_one", "expected"), [((1, 1), 0, "wrong"), ((1, 0), 0, "ok"), ((1, 1), 1, "ok")]
)
def test_batches_that_ranks_leave_out_at_the_end(left, of_one, expected):
    ranks = [trace(plan, num_left=n) for plan, n in zip(("abcd", "efgh"), left, strict=True)]
    one = trace("abcdefgh", num_left=of_one)
    assert verdicts(ranks, one)["samples-lost"] == expected


LOSSES = ("all_reduce", [[0.5], [0.25]], [0.75])


@pytest.mark.parametrize(
    ("counts", "calls", "expected"),
    [
        ((20, 24), [("all_reduce", [[20], [24]], [20])], "wrong"),
        ((20, 24), [("all_gather_object", [[], []], [20, 24])], "wrong"),
        ((20, 24), [LOSSES, ("all_reduce", [[20], [24]], [20])], "wrong"),
        ((20, 24), [("all_reduce", [[20], [24]], [44])], "unknown"),  # for a mean over all
        ((20, 24), [], "unknown"),  # one may join early, or begin again
        ((24, 24), [("all_reduce", [[24], [24]], [24])], "ok"),
    ],
)
def test_ranks_that_take_the_fewest_batches_of_all(counts, calls, expected):
    ranks = [
        trace(
            plan,
            *(Collective(name, values, given[r]) for name, given, values in calls),
            num_batches=n,
        )
        for r, (plan, n) in enumerate(zip(("abcd", "efgh"), counts, strict=True))
    ]
    assert verdicts(ranks, trace("abcdefgh", num_batches=44))["samples-lost"] == expected


def endless(rows, *, how="stopped"):
    """Make a rank that trains with `rows`, two a step, again and again, without a loader."""
    steps = [step(n, (), rows[2 * n % len(rows) :][:2]) for n in range(len(rows))]
    return ran(*steps, how=how)


@pytest.mark.parametrize(
    ("ranks", "one", "expected"),
    [
        (("abcd", "efgh"), "abcdefgh", "unknown"),
        (("abcd", "ijkl"), "abcdefghijkl", "wrong"),  # all take the fewest steps of their files
        (("abcdef", "ghij"), "abcdefghijkl", "wrong"),
    ],
)
def test_samples_that_no_rank_comes_to_are_found_without_a_loader(ranks, one, expected):
    found = verdicts([endless(rows) for rows in ranks], endless(one))
    assert found["samples-lost"] == expected


def test_a_stream_that_never_repeats_is_not_judged():
    steps = [step(n, (), (f"row {n}",)) for n in range(9)]
    ranks = [ran(*steps[:4], how="stopped"), ran(*steps[4:], how="stopped")]
    assert verdicts(ranks, ran(*steps, how="stopped"))["samples-lost"] == "unknown"


@pytest.mark.parametrize(
    ("num_ranks", "num_alone", "how", "is_found"),
    [
        (1, 1, ("ended", "ended"), False),
        (1, 2, ("ended", "stopped"), True),
        (1, 2, ("stopped", "ended"), False),  # ranks were stopped earlier
        (2, 1, ("stopped", "ended"), True),
        (2, 1, ("ended", "stopped"), False),
    ],
)
def test_runs_that_take_other_numbers_of_steps(num_ranks, num_alone, how, is_found):
    steps = [step(number) for number in range(2)]
    ranks = [ran(*steps[:num_ranks], rank=rank, how=how[0]) for rank in range(2)]
    seen = TwoRuns(ranks, ran(*steps[:num_alone], how=how[1]))
    found, other = with_numbers_of_steps([ok("samples-lost", ""), ok("split-differs", "")], seen)
    assert (found.verdict == "wrong", other.verdict) == (is_found, "ok")
    open_ones = [ok("samples-lost", ""), unknown("split-differs", "")]
    assert with_numbers_of_steps(open_ones, seen) == open_ones
