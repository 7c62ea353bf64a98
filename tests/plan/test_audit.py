"""Who is wrong: a table of opinions, and what holds for all of them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unisono.plan.audit import (
    Judgement,
    Opinion,
    checked_by,
    interval_for,
    is_audited,
    judge,
    judge_hosts,
    judge_kept,
)


def opinions(*said):
    """Each of "0a" is rank 0's, who found a; "0a/x" found a of one name and x of another."""
    return [
        Opinion(int(one[0]), dict(zip(("first", "second"), one[1:].split("/"), strict=False)))
        for one in said
    ]


AGREED, UNDECIDED = Judgement("agreed"), Judgement("undecided", (), ("first",))
UNREPEATABLE = Judgement("unrepeatable", (), ("first",))


def wrong(*ranks, names=("first",)):
    return Judgement("wrong", ranks, names)


@pytest.mark.parametrize(
    ("said", "judgement"),
    [
        (["0a"], AGREED),
        (["0a", "1a"], AGREED),
        (["0a", "1a", "2a", "0a"], AGREED),
        # two alone cannot tell, before they have computed again
        (["0a", "1b"], UNDECIDED),
        # whoever published something wrong, and computes it well now
        (["0b", "1a", "0a", "1a"], wrong(0)),
        # the one that checked was wrong
        (["0a", "1b", "0a", "1a"], wrong(1)),
        # always wrong, each time otherwise: the other one finds the same again
        (["0b", "1a", "0c", "1a"], wrong(0)),
        # always wrong, always the same: nobody knows who
        (["0b", "1a", "0b", "1a"], UNDECIDED),
        # a third decides, also where the same one is wrong in the same way twice
        (["0b", "1a", "2a"], wrong(0)),
        (["0b", "1a", "0b", "1a", "2a"], wrong(0)),
        (["0a", "1b", "0a", "1c", "2a"], wrong(1)),
        # two of three are wrong, in different ways
        (["0a", "1b", "0a", "1c", "2d"], wrong(1, 2)),
        # each finds something else every time: the program, not the machine
        (["0a", "1b", "0c", "1d"], UNREPEATABLE),
        (["0a", "1b", "0c", "1d", "2e"], UNREPEATABLE),
        (["0a", "0b", "0c"], UNREPEATABLE),
        # one worker alone
        (["0a", "0b", "0a"], wrong(0)),
        (["0b", "0a", "0a"], wrong(0)),
        # two against two
        (["0a", "1a", "2b", "3b"], UNDECIDED),
        # what is the same is not named
        (["0a/x", "1a/y", "2a/x"], wrong(1, names=("second",))),
        (["0a/x", "1b/y", "2a/x"], wrong(1, names=("first", "second"))),
        # what one has and another has not
        (["0a/x", "1a", "2a/x"], wrong(1, names=("second",))),
    ],
)
def test_who_is_wrong(said, judgement):
    assert judge(opinions(*said)) == judgement


@pytest.mark.parametrize(
    ("now", "before", "reference", "judgement"),
    [
        (["0a", "1a"], [], None, AGREED),
        (["0a", "1b"], [], None, UNDECIDED),
        (["0a", "1b", "2a"], [], None, wrong(1)),
        # nobody has changed it since all kept the same
        (["0a", "1b"], [], "a", wrong(1)),
        (["0b", "1c"], [], "a", UNDECIDED),
        # the steps have come again
        (["0a", "1a"], ["0a", "1b"], None, wrong(1)),
        (["0a", "1a"], ["0b", "1a"], None, wrong(0)),
        # one's wrong parameters had led to wrong gradients for all: nobody is accused
        (["0a", "1a"], ["0b", "1c"], None, AGREED),
        # and they differ again
        (["0a", "1b"], ["0a", "1c"], None, wrong(1)),
        (["0a", "1b"], ["0a", "1b"], None, UNDECIDED),
        (["0a", "1b"], ["0c", "1d"], None, UNREPEATABLE),
        # what all kept counts more
        (["0a", "1b"], ["0a", "1b"], "b", wrong(0)),
    ],
)
def test_who_keeps_something_wrong(now, before, reference, judgement):
    known = None if reference is None else {"first": reference}
    assert judge_kept(opinions(*now), opinions(*before), known) == judgement


ONE_AND_THREE, TWO_AND_TWO = ((0,), (1, 2, 3)), ((0, 1), (2, 3))
EACH_TWO = (*TWO_AND_TWO, (4, 5))
UNDECIDED_HOSTS = Judgement("undecided", (), ("first",), is_of_hosts=True)


def wrong_hosts(*ranks, names=("first",)):
    return Judgement("wrong", ranks, names, is_of_hosts=True)


@pytest.mark.parametrize(
    ("hosts", "now", "before", "reference", "judgement"),
    [
        (TWO_AND_TWO, ["0a", "1a", "2a", "3a"], [], None, AGREED),
        # the copy of a host counts once, however many workers use it
        (ONE_AND_THREE, ["0a", "1b", "2b", "3b"], [], None, UNDECIDED_HOSTS),
        (ONE_AND_THREE, ["0a", "1b", "2b", "3b"], [], "b", wrong_hosts(0)),
        (EACH_TWO, ["0a", "1a", "2b", "3b", "4a", "5a"], [], None, wrong_hosts(2, 3)),
        # the steps have come again
        (
            ONE_AND_THREE,
            ["0a", "1a", "2a", "3a"],
            ["0a", "1b", "2b", "3b"],
            None,
            wrong_hosts(1, 2, 3),
        ),
        (TWO_AND_TWO, ["0a", "1a", "2a", "3a"], ["0b", "1b", "2c", "3c"], None, AGREED),
        # a worker that keeps something else than its neighbours is alone
        (ONE_AND_THREE, ["0a", "1a", "2b", "3a"], [], None, wrong(2)),
        (TWO_AND_TWO, ["0a", "1a", "2a", "3a"], ["0a", "1a", "2a", "3b"], None, wrong(3)),
        # and what its neighbours share is looked at for itself
        (
            ONE_AND_THREE,
            ["0a/x", "1a/y", "2b/y", "3a/y"],
            [],
            "a/x",
            wrong_hosts(1, 2, 3, names=("second",)),
        ),
    ],
)
def test_who_keeps_something_wrong_on_several_hosts(hosts, now, before, reference, judgement):
    known = None if reference is None else opinions(f"0{reference}")[0].digests
    assert judge_hosts(opinions(*now), opinions(*before), known, hosts) == judgement


@given(st.integers(3, 9), st.data())
def test_one_among_several_is_always_found(num_workers, data):
    culprit = data.draw(st.integers(0, num_workers - 1))
    checked = checked_by(culprit, num_workers)
    # It publishes something wrong, and what it checks it computes wrong, each time in any way.
    ways = st.sampled_from("wxyz")
    right = dict.fromkeys(range(num_workers), "a") | {culprit: data.draw(ways)}
    checker = next(p for p in range(num_workers) if checked_by(p, num_workers) == culprit)
    of_its_own = [f"{culprit}{right[culprit]}", f"{checker}a"]
    of_another = [f"{checked}a", f"{culprit}{data.draw(ways)}"]
    for first in (of_its_own, of_another):
        again = [f"{r}{data.draw(ways) if r == culprit else 'a'}" for r in range(num_workers)]
        assert judge(opinions(*first, *again)) == wrong(culprit)


@given(st.lists(st.tuples(st.integers(0, 4), st.sampled_from("ab")), min_size=1), st.randoms())
def test_the_order_in_which_opinions_come_is_of_no_account(said, random):
    shuffled = random.sample(said, len(said))
    first, second = (
        judge(opinions(*[f"{rank}{what}" for rank, what in many])) for many in (said, shuffled)
    )
    assert first == second


@given(st.integers(1, 12))
def test_everybody_is_checked_by_another(num_workers):
    checked = [checked_by(position, num_workers) for position in range(num_workers)]
    assert sorted(checked) == list(range(num_workers))
    assert num_workers == 1 or all(a != b for a, b in enumerate(checked))


def test_which_steps_are_audited():
    assert [step for step in range(11) if is_audited(step, 4, end_step=11)] == [3, 7, 10]
    assert [step for step in range(3) if is_audited(step, 1, end_step=9)] == [0, 1, 2]


@pytest.mark.parametrize(
    ("audit_s", "step_s", "interval"), [(1.0, 1.0, 100), (0.5, 1.0, 50), (0.001, 1.0, 1)]
)
def test_the_interval_that_costs_at_most_a_hundredth(audit_s, step_s, interval):
    assert interval_for(audit_s, step_s) == interval
