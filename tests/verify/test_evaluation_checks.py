import pytest
from tests.verify.made import ALONE, ran

from unisono.tools.verify.findings import ok, wrong
from unisono.tools.verify.print_hooks import numbers_in
from unisono.tools.verify.sample_checks import check_evaluations, with_means_of_evaluations
from unisono.tools.verify.trace import Collective, EvaluationPass, Iteration, LoaderFacts, TwoRuns

GATHERED_COUNTS = Collective("all_gather", (2.0, 3.0, 1.0, 3.0))  # right, of so many
GATHERED_CLASSES = Collective("all_gather", (3.0, 3.0, 3.0, 3.0, 3.0, 3.0))
SUM_OF_COUNTS = Collective("all_reduce", (3.0, 6.0))


def verdicts(samples, calls=(), *, one=None, how="ended"):
    ranks = [
        ran(*[EvaluationPass(of_rank, of_rank, (), calls)][: len(of_rank)], how=how)
        for of_rank in samples
    ]
    alone = ALONE if one is None else ran(EvaluationPass(one))
    found = check_evaluations(TwoRuns(ranks, alone))
    return tuple(finding.verdict for finding in found)


@pytest.mark.parametrize(
    ("samples", "calls", "one", "expected"),
    [
        # (of each rank, what they put together, of one rank, (partial, counts twice))
        (("abc", "def"), (SUM_OF_COUNTS,), "abcdef", ("ok", "ok")),
        (("abc", "def"), (), "abcdef", ("wrong", "ok")),
        (("abcdef", "abcdef"), (), "abcdef", ("ok", "ok")),
        (("abcdef", "abcdef"), (SUM_OF_COUNTS,), "abcdef", ("ok", "ok")),
        (("abcdef", ""), (), "abcdef", ("ok", "ok")),  # rank 0 alone
        (("abc", ""), (), "abcdef", ("wrong", "ok")),  # rank 0 alone, and only its part
        (("abc", "xyz"), (), "uvw", ("unknown", "ok")),  # each draws some to look at
        (("abc", "dea"), (SUM_OF_COUNTS,), "abcde", ("ok", "wrong")),
        (("abc", "dea"), (Collective("all_reduce", (5.0,)),), "abcde", ("ok", "ok")),  # masked
        (("abc", "dea"), (Collective("all_gather"),), "abcde", ("ok", "unknown")),  # maybe cut
        (("abc", "de"), (SUM_OF_COUNTS,), "abcdef", ("wrong", "ok")),  # the last one is left out
        (("abc", "dea"), (GATHERED_COUNTS,), "abcde", ("ok", "wrong")),
        (("abc", "dea"), (GATHERED_CLASSES,), "abcde", ("ok", "unknown")),  # of each sample
    ],
)
def test_what_ranks_evaluate(samples, calls, one, expected):
    assert verdicts(samples, calls, one=one) == expected


def test_nothing_to_evaluate():
    assert verdicts(("", "")) == ("ok", "ok")
    assert verdicts(("", ""), how="stopped") == ("unknown", "unknown")


@pytest.mark.parametrize(
    ("num_epochs", "num_idle", "expected"), [(3, 0, "ok"), (1, 0, "unknown"), (3, 1, "unknown")]
)
def test_a_program_without_an_evaluation_is_verified(num_epochs, num_idle, expected):
    epochs = [Iteration(epoch=epoch) for epoch in range(num_epochs)]
    loaders = [LoaderFacts(number) for number in range(1 + num_idle)]
    ranks = [ran(*loaders, *epochs, how="stopped")] * 2
    found = check_evaluations(TwoRuns(ranks, ALONE))
    assert [finding.verdict for finding in found] == [expected] * 2


@pytest.mark.parametrize(
    ("printed", "of_one", "expected"),
    [
        (("0.8333",), ("0.8333",), "wrong"),  # 5 of 6; one rank is given the repeats, too
        (("0.47", "83.33"), ("0.45", "83.33"), "wrong"),  # rank 0's own loss before
        (("0.8000",), ("0.8000",), "ok"),  # 4 of 5: repeats are left out
        (("0.6931",), ("0.6931",), "unknown"),  # a mean of losses
        (("0.8333",), ("0.8000",), "unknown"),
        (("1.0000", "0.5000"), ("1.0000", "0.4000"), "unknown"),
        ((), (), "unknown"),
    ],
)
def test_what_is_printed_tells_whether_repeats_count(printed, of_one, expected):
    gathered = (Collective("all_gather"),)
    ranks = [ran(EvaluationPass(s, s, (), gathered, printed)) for s in ("abc", "dea")]
    one = ran(EvaluationPass("abcde", "abcde", printed=of_one))
    found = check_evaluations(TwoRuns(ranks, one))[1]
    assert (found.check, found.verdict) == ("evaluation-counts-twice", expected)


def test_numbers_are_found_in_what_is_printed():
    assert numbers_in("epoch 3: accuracy 98.44%, loss 0.6931\n") == ["98.44", "0.6931"]
    assert numbers_in("torch 2.13.0, v1.2, x0.5y") == []
    assert numbers_in("\r 50%, 3.21it/s") == []


def test_an_evaluation_that_was_cut_off_is_not_judged():
    ranks = [ran(EvaluationPass(s, is_finished=False), how="stopped") for s in ("ab", "cd")]
    found = check_evaluations(TwoRuns(ranks, ALONE))
    assert [finding.verdict for finding in found] == ["unknown", "unknown"]


ALL_WELL = [ok("mean-of-means", ""), ok("parameters-differ", "")]
LOSSES = {"a": 1.0, "b": 2.0, "c": 6.0, "d": 4.0, "e": 7.0}


def mean(samples):
    return sum(LOSSES[sample] for sample in samples) / len(samples)


def total(samples):
    return sum(LOSSES[sample] for sample in samples)


def run(samples, number, joined, name="all_reduce"):
    """Make the trace of each rank, which puts one number together."""
    given = [number(of_rank) for of_rank in samples]
    return [
        ran(EvaluationPass(rows=rows, collectives=[Collective(name, [joined(given)], [one])]))
        for rows, one in zip(samples, given, strict=True)
    ]


def verdict(samples, number, joined=sum, findings=ALL_WELL, together="abcde", **fields):
    (one,) = run([together], number, joined, **fields)
    seen = TwoRuns(run(samples, number, joined, **fields), one)
    (found,) = [
        finding
        for finding in with_means_of_evaluations(findings, seen)
        if finding.check == "mean-of-means"
    ]
    return found


def average(values):
    return sum(values) / len(values)


@pytest.mark.parametrize(
    ("samples", "number", "joined", "expected"),
    [
        (("abc", "de"), mean, sum, "wrong"),
        (("abc", "de"), mean, average, "wrong"),
        (("a", "bcde"), mean, sum, "wrong"),
        (("abc", "d", "e"), mean, sum, "wrong"),
        (("abc", "de"), total, sum, "ok"),  # sums are right
        (("abc", "de"), len, sum, "ok"),  # counts are
        (("abc", "de"), lambda samples: 3.0, sum, "ok"),  # ranks agree
        (("abc", "de"), mean, max, "ok"),  # the largest
        (("abc", "de"), lambda samples: 0.1 * len(samples) ** 0.3, sum, "ok"),  # a time
        (("abd", "cde"), mean, sum, "ok"),  # equally many
        (("abc", "ce"), mean, sum, "ok"),  # not what one rank computes
    ],
)
def test_a_mean_of_means_is_told_from_what_is_right(samples, number, joined, expected):
    found = verdict(samples, number, joined)
    assert (found.verdict, "averaged as if" in found.evidence) == (expected, expected == "wrong")


def test_beside_a_mistake_and_in_gathered_results_none_is_looked_for():
    findings = [*ALL_WELL, wrong("evaluation-partial", "", "")]
    assert verdict(("abc", "de"), mean, findings=findings).verdict == "ok"
    assert verdict(("abc", "de"), mean, name="all_gather").verdict == "ok"


def test_a_run_on_one_rank_that_calls_nothing_is_no_evidence():
    one = ran(EvaluationPass(rows="abcde"))
    seen = TwoRuns(run(("abc", "de"), mean, sum), one)
    assert with_means_of_evaluations(ALL_WELL, seen) == ALL_WELL
    assert with_means_of_evaluations(ALL_WELL, TwoRuns(seen.ranks, ALONE)) == ALL_WELL
