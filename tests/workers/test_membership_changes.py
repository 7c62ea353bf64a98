"""Ranks that are lost in the midst of things: those who are left agree on all that was said."""

import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.threads import in_threads
from tests.workers.fake_launcher import MOMENTS, Death, FakeLauncher, FakeSupervisor, Job

from unisono.errors import MismatchError
from unisono.runtime.workers import meeting_point
from unisono.runtime.workers import meeting_point as futex
from unisono.runtime.workers.control_block import ControlBlock
from unisono.runtime.workers.launcher_messages import LOOP, LoopBegan, Ready
from unisono.runtime.workers.membership import Membership
from unisono.runtime.workers.team import _CHUNK_BYTES, Team


@pytest.fixture(autouse=True, scope="module")
def short_sleeps():
    # One that sleeps for the first of several missing looks for the others only now and then.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(meeting_point, "SLEEP_AT_MOST_S", 0.005)
        yield


@pytest.fixture
def job(control_of):
    def make(world_size, *deaths, **options):
        return Job(control_of(world_size), deaths, **options)

    return make


def of_rank(rank, num_chunks=1):
    return b"%d" % rank * (_CHUNK_BYTES * (num_chunks - 1) + 5)


# Meetings.


@pytest.mark.parametrize(
    ("death", "all_came"),
    [
        (Death(2, 1, "before"), [False, True, True]),
        (Death(2, 1, "after"), [True, False, True]),  # it had come: nobody stops there
        (Death(2, 2, "before"), [True, False, True]),
        (Death(2, 3, "before"), [True, True, False]),
        (Death(2, 3, "after"), [True, True, True]),
    ],
)
def test_all_stop_at_the_first_meeting_that_a_lost_one_missed(job, death, all_came):
    def work(team):
        came = [team.meet(f"meeting {n}") for n in range(3)]
        return came, team.membership.ranks, team.position

    one = job(3, death)
    membership = (0, 1) if False in all_came else (0, 1, 2)
    assert one.run(work) == {0: (all_came, membership, 0), 1: (all_came, membership, 1)}


@pytest.mark.parametrize(
    ("deaths", "membership"),
    [
        ([Death(0, 1, "before")], Membership((1, 2, 3), 1, 1)),
        ([Death(3, 1, "before")], Membership((0, 1, 2), 0, 1)),
        ([Death(0, 1, "before"), Death(1, 2, "before")], Membership((2, 3), 2, 2)),
        ([Death(0, 1, "before"), Death(1, 1, "after"), Death(3, 2, "before")], Membership((2,), 2)),
    ],
)
def test_those_who_are_left_see_the_same_crew(job, deaths, membership):
    def work(team):
        for n in range(4):
            team.meet(f"meeting {n}")
        return team.membership

    results = job(4, *deaths).run(work)
    assert tuple(sorted(results)) == membership.ranks
    for seen in results.values():
        assert (seen.ranks, seen.leader) == (membership.ranks, membership.leader)
        assert seen.generation >= max(membership.generation, 1)
    assert len(set(results.values())) == 1


@pytest.mark.parametrize("moment", ["stopping", "stopped"])
def test_one_that_is_lost_while_it_stands_still_is_left_behind_too(job, moment):
    def work(team):
        return [team.meet("first"), team.meet("second")], team.membership

    results = job(3, Death(2, 1, "before"), Death(1, 1, moment)).run(work)
    assert results[0][1].ranks == (0,)
    assert results[0][0][0] is False
    # It may have been told to go on before it died; then it is missed at the next meeting.
    assert results[0][0] == [False, True] or moment == "stopped"


def test_purposes_are_compared_after_somebody_was_lost(job):
    def work(team):
        team.meet("digest")
        team.meet("save" if team.world.rank == 0 else "step 12")

    results = job(3, Death(2, 2, "before")).run(work)
    assert sorted(results) == [0, 1]
    for rank, error in results.items():
        assert isinstance(error, MismatchError)
        assert f"rank {rank} came to `{'step 12' if rank else 'save'}`" in str(error)


def test_the_purpose_of_a_lost_one_does_not_matter(job):
    def work(team):
        return team.meet("save" if team.world.rank == 2 else "digest")

    assert job(3, Death(2, 1, "before")).run(work) == {0: False, 1: False}


# What ranks tell each other.


@pytest.mark.parametrize(
    ("num_chunks", "deaths", "heard"),
    [
        # Two meetings a chunk: all have written, all have read.
        ((1, 1, 1), [Death(2, 1, "posting")], {0, 1}),
        ((1, 1, 1), [Death(2, 1, "before")], {0, 1}),
        ((1, 1, 1), [Death(2, 1, "after")], {0, 1, 2}),
        ((1, 1, 1), [Death(2, 2, "before")], {0, 1, 2}),
        ((1, 1, 1), [Death(0, 1, "before")], {1, 2}),
        # of a longer message nothing is heard unless its last part was written
        ((3, 3, 3), [Death(2, 1, "after")], {0, 1}),
        ((3, 3, 3), [Death(2, 3, "posting")], {0, 1}),
        ((3, 3, 3), [Death(2, 3, "after")], {0, 1}),
        ((3, 3, 3), [Death(2, 5, "before")], {0, 1}),
        ((3, 3, 3), [Death(2, 5, "after")], {0, 1, 2}),
        # others have said all when it is lost
        ((1, 2, 3), [Death(2, 5, "before")], {0, 1}),
        ((1, 2, 3), [Death(0, 3, "before")], {0, 1, 2}),
        ((3, 2, 1), [Death(0, 3, "before"), Death(1, 4, "before")], {1, 2}),
    ],
)
def test_everybody_hears_the_same_whole_messages(job, num_chunks, deaths, heard):
    def work(team):
        rank = team.world.rank
        return team.gather(of_rank(rank, num_chunks[rank]), "gather")

    results = job(3, *deaths).run(work)
    expected = {rank: of_rank(rank, num_chunks[rank]) for rank in sorted(heard)}
    assert sorted(results) == sorted({0, 1, 2} - {death.rank for death in deaths})
    for said in results.values():
        assert said == expected
        assert list(said) == sorted(said)


@pytest.mark.parametrize(
    ("num_chunks", "deaths", "word", "speakers"),
    [
        (1, [], 0, [0]),
        (1, [Death(0, 1, "posting")], 1, [0, 1]),
        (1, [Death(0, 1, "before")], 1, [0, 1]),
        (1, [Death(0, 1, "after")], 0, [0]),  # it had spoken
        (1, [Death(1, 1, "before")], 0, [0]),  # others matter to nobody
        (2, [Death(0, 2, "after")], 1, [0, 1]),
        (2, [Death(0, 3, "after")], 0, [0]),
        (1, [Death(0, 1, "before"), Death(1, 1, "stopping")], 2, [0, 2]),
        (1, [Death(0, 1, "before"), Death(1, 3, "before")], 2, [0, 1, 2]),
        (1, [Death(0, 1, "before"), Death(1, 3, "after")], 1, [0, 1]),
    ],
)
def test_a_lead_that_is_lost_before_it_has_spoken_is_followed_by_the_next(
    job, num_chunks, deaths, word, speakers
):
    spoke = []

    def work(team):
        def speak():
            spoke.append(team.world.rank)
            return of_rank(team.world.rank, num_chunks)

        return team.broadcast_from_leader(speak, "hear")

    results = job(4, *deaths).run(work)
    assert set(results.values()) == {of_rank(word, num_chunks)}
    assert spoke == speakers


def test_differences_count_of_those_who_are_left(job):
    def work(team):
        team.agree({"`seed`": team.world.rank if team.world.rank == 3 else 0})

    results = job(4, Death(0, 1, "before")).run(work)
    assert sorted(results) == [1, 2, 3]
    for error in results.values():
        assert "`seed` must be the same on every worker, but is 0 on rank 1 and 3 on rank 3" in str(
            error
        )
    assert job(4, Death(3, 1, "before")).run(work) == {0: None, 1: None, 2: None}


@st.composite
def disasters(draw):
    world_size = draw(st.integers(2, 5))
    dying = draw(st.sets(st.integers(0, world_size - 1), max_size=world_size - 1))
    deaths = [
        Death(rank, draw(st.integers(1, 12)), draw(st.sampled_from(MOMENTS)))
        for rank in sorted(dying)
    ]
    chunks = [draw(st.integers(1, 3)) for _ in range(world_size)]
    return world_size, deaths, chunks


@pytest.mark.slow
@settings(deadline=None, max_examples=60)
@given(disasters())
def test_whoever_dies_wherever_those_who_are_left_have_heard_the_same(case):
    world_size, deaths, chunks = case

    def work(team):
        rank = team.world.rank
        said = [team.gather(of_rank(rank, chunks[rank]), "gather") for _ in range(2)]
        word = team.broadcast_from_leader(lambda: of_rank(rank, 2), "hear")
        return said, word, team.gather(b"the end", "end"), team.membership

    control = ControlBlock.create(world_size)
    try:
        results = Job(control, deaths).run(work)
    finally:
        control.close()
    assert {0, 1, 2, 3, 4} >= set(results) >= set(range(world_size)) - {d.rank for d in deaths}
    (first, *others) = results.values()
    said, word, _, membership = first
    for other in others:
        assert other[:2] == first[:2]
    assert word in [of_rank(rank, 2) for rank in range(world_size)]
    for heard in said:
        assert set(heard) >= set(results)
        assert all(message == of_rank(rank, chunks[rank]) for rank, message in heard.items())
    assert set(membership.ranks) >= set(results)


# Between two steps.


def test_all_who_pause_hear_the_same_crew(job):
    def work(team):
        team.pause()
        return team.membership, team.meet("on")

    membership = Membership((0, 1, 2), 0, 1)
    assert job(3).run(work) == dict.fromkeys(range(3), (membership, True))


def test_only_the_plan_of_the_lead_counts(job):
    def work(team):
        team.plan(1, 5 + team.world.rank)
        team.meet("step")
        return team.planned(1), team.planned(2)

    assert job(3).run(work) == dict.fromkeys(range(3), (5, 0))
    assert job(3, Death(0, 1, "before")).run(work) == {1: (6, 0), 2: (6, 0)}


def steps_until_all_are_back(team, *, joined_at=None):
    """Make steps until every seat has been taken; stop between two where the leader has planned."""
    step, num_lost = joined_at or 0, 0
    while True:
        if team.planned(step) and step != joined_at:
            team.pause()
        if step >= 5 and team.size == team.world.world_size:
            return step, num_lost, team.membership
        num_lost += not team.meet("gradients")
        if team.is_leader:
            team.plan(step + 1, int(team.is_stop_requested))
        num_lost += not team.meet("update")
        step += 1


@pytest.mark.parametrize("rank", [0, 1, 2])
@pytest.mark.parametrize("moment", ["before", "after"])
def test_a_replacement_joins_between_two_steps(control_of, rank, moment):
    control = control_of(3)

    def work(team):
        if team.is_replacement:
            entry = team.supervisor.catch_up(0, LOOP)
            assert not entry.is_alone
            team.join(entry.membership)
            # In a real run the snapshot says which step comes next; here each has two meetings.
            return steps_until_all_are_back(
                team, joined_at=control.lines[team.world.rank].arrivals // 2
            )
        team.supervisor.notify(LoopBegan(0, {}))
        return steps_until_all_are_back(team)

    results = Job(control, [Death(rank, 3, moment)], replaces=True).run(work)
    leader = 1 if rank == 0 else 0
    assert {(step, membership) for step, _, membership in results.values()} == {
        (results[leader][0], Membership((0, 1, 2), leader, results[leader][2].generation))
    }
    assert [results[other][1] for other in range(3)] == [int(other != rank) for other in range(3)]


def test_one_that_joins_somebody_alone_is_waited_for_whatever_its_place_had_counted(
    control_of, monkeypatch
):
    # Both were lost after many meetings; the first replacement counts anew, the second joins it.
    control = control_of(2)
    for rank in range(2):
        control.mark_replaced(rank, 1000)
        for which in range(2):
            control.lines[rank].purposes[which].value = b"step"
    launcher = FakeLauncher(control, replaces=True)
    launcher.take(0, LoopBegan(0, {}))
    launcher.lose(0)
    launcher.lose(1)
    waits = threading.Event()

    def sleep(address, seen, timeout_s, wait=futex.wait):
        waits.set()
        wait(address, seen, timeout_s)

    monkeypatch.setattr(futex, "wait", sleep)
    order = []

    def work(rank):
        team = Team(FakeSupervisor(launcher, rank, control))
        try:
            if rank == 1:
                while not launcher.state.membership:
                    launcher.take(1, Ready())
            entry = team.supervisor.catch_up(0, LOOP)
            if rank == 1:
                waits.wait(30)  # until the other stands at the meeting, or has gone on
                order.append("joins")
            team.join(entry.membership)
            while team.size == 1:
                assert team.meet("step")
                team.pause()
            met = team.meet("step")
            order.append("met")
            return met
        finally:
            waits.set()

    assert in_threads(2, work) == [True, True]
    assert order == ["joins", "met", "met"]
