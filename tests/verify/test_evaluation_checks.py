import pytest

from unisono.verify.evaluation_checks import check_evaluations
from unisono.verify.rank_trace import Collective, EvaluationPass, RankTrace, TwoRuns

SUM_OF_COUNTS = Collective("all_reduce", (3.0, 6.0))


def verdicts(samples, calls=(), *, one=None, how="ended"):
    ranks = tuple(
        RankTrace(
            evaluations=(EvaluationPass(tuple(of_rank), tuple(of_rank), (), tuple(calls)),)
            if of_rank
            else (),
            how=how,
        )
        for of_rank in samples
    )
    alone = None if one is None else RankTrace(evaluations=(EvaluationPass(tuple(one)),))
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
    ],
)
def test_what_ranks_evaluate(samples, calls, one, expected):
    assert verdicts(samples, calls, one=one) == expected


def test_nothing_to_evaluate():
    assert verdicts(("", "")) == ("ok", "ok")
    assert verdicts(("", ""), how="stopped") == ("unknown", "unknown")


def test_an_evaluation_that_was_cut_off_is_not_judged():
    ranks = tuple(
        RankTrace(evaluations=(EvaluationPass(tuple(s), is_finished=False),), how="stopped")
        for s in ("ab", "cd")
    )
    found = check_evaluations(TwoRuns(ranks))
    assert [finding.verdict for finding in found] == ["unknown", "unknown"]
