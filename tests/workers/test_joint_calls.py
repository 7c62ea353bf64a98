"""What workers have done together, and how a replacement catches up with it."""

import pytest
from tests.workers.desk import Death, Job
from tests.workers.test_barrier import control_of  # noqa: F401

from unisono.runtime.workers.context import context
from unisono.runtime.workers.control_block import ControlBlock
from unisono.runtime.workers.joint_calls import JointCalls
from unisono.runtime.workers.launcher_messages import (
    LOOP,
    JointResult,
    Live,
    LoopBegan,
    Membership,
    NoRecovery,
    Passed,
)
from unisono.runtime.workers.supervisor import Supervisor
from unisono.runtime.workers.team import StepBrokenError, Team
from unisono.runtime.world import World


class Recorder(Supervisor):
    """Notes what it is told and answers from a list."""

    can_replace = True

    def __init__(self, *entries):
        self.world = World()
        self.control = ControlBlock.private()
        self.incarnation = int(bool(entries))
        self.told = []
        self.asked = []
        self.outcomes = []
        self._entries = list(entries)

    def memory(self, key, num_bytes, gather):
        raise AssertionError("no memory is wanted")

    def tell(self, message):
        self.told.append(message)

    def outcome(self, index, name):
        return self.outcomes.pop(0)

    def catch_up(self, index, name):
        self.asked.append((index, name))
        return self._entries.pop(0)


def history_with(*entries):
    host = Recorder(*entries)
    team = Team(host)
    return JointCalls(team), host, team


def unwanted():
    raise AssertionError("the others have done it")


LIVE = Live(Membership((0,), 0, 4), loop=None, is_alone=False)


def test_what_is_done_together_is_told_in_order():
    joint_calls, host, _ = history_with()
    assert joint_calls.together("it", lambda: b"agreed") == b"agreed"
    assert joint_calls.together("it", lambda: b"digest") == b"digest"
    assert joint_calls.index == 2
    assert host.told == [JointResult(0, "it", b"agreed"), JointResult(1, "it", b"digest")]
    assert host.asked == []


def test_where_others_are_missed_a_call_is_made_again_or_what_they_found_is_taken():
    joint_calls, host, _ = history_with()
    host.ranks_of_host = ((0,), (1,))
    host.outcomes = [None, b"found"]
    calls = []

    def act():
        calls.append("called")
        raise StepBrokenError

    assert joint_calls.together("it", act) == b"found"
    assert len(calls) == 2
    assert host.told == [JointResult(0, "it", b"found")]


def test_a_loop_is_told_when_it_can_be_joined_and_where_it_ended():
    joint_calls, host, _ = history_with()
    assert joint_calls.enter_loop() is None
    joint_calls.note_loop({"shards": 8})
    assert joint_calls.index == 0  # while it is under way
    joint_calls.leave_loop(b"step 90")
    joint_calls.together("it", lambda: b"digest")
    assert host.told == [
        LoopBegan(0, {"shards": 8}),
        JointResult(0, LOOP, b"step 90"),
        JointResult(1, "it", b"digest"),
    ]


def test_what_happens_inside_of_a_loop_is_not_counted():
    joint_calls, host, _ = history_with()
    joint_calls.enter_loop()
    assert joint_calls.together("it", lambda: b"digest of step 3") == b"digest of step 3"
    assert joint_calls.index == 0
    assert host.told == []


def test_a_replacement_hears_what_came_of_things_and_does_not_do_them():
    loop = {"shards": 8}
    joint_calls, host, team = history_with(Passed(b"agreed"), Passed(b"step 90", loop), LIVE)
    assert joint_calls.together("it", unwanted) == b"agreed"
    assert joint_calls.enter_loop() == Passed(b"step 90", loop)
    assert joint_calls.together("it", lambda: b"digest") == b"digest"  # here it has caught up
    assert joint_calls.together("it", lambda: b"more") == b"more"
    assert host.asked == [(0, "it"), (1, LOOP), (2, "it")]
    assert host.told == [JointResult(2, "it", b"digest"), JointResult(3, "it", b"more")]
    assert team.membership == LIVE.membership


def test_a_replacement_joins_a_loop_and_ends_it_with_the_others():
    live = Live(Membership((0,), 0, 4), loop={"shards": 8}, is_alone=False)
    joint_calls, host, team = history_with(Passed(b"agreed"), live)
    joint_calls.together("it", unwanted)
    assert joint_calls.enter_loop() == live
    assert team.membership == live.membership
    joint_calls.leave_loop(b"step 90")
    assert joint_calls.enter_loop() is None
    assert host.told == [JointResult(1, LOOP, b"step 90")]
    assert host.asked == [(0, "it"), (1, LOOP)]


def test_a_loop_inside_of_a_loop_gives_up_recovery():
    joint_calls, host, _ = history_with()
    joint_calls.enter_loop()
    joint_calls.note_loop({"outer": 1})
    assert joint_calls.enter_loop() is None
    joint_calls.note_loop({"inner": 1})
    joint_calls.leave_loop(b"inner")
    assert joint_calls.index == 0
    joint_calls.leave_loop(b"outer")
    assert host.told == [
        LoopBegan(0, {"outer": 1}),
        NoRecovery("one loop over steps runs inside of another"),
        JointResult(0, LOOP, b"outer"),
    ]


def test_a_loop_that_is_left_before_its_end_gives_up_recovery():
    joint_calls, host, _ = history_with()
    joint_calls.enter_loop()
    joint_calls.leave_loop(None)
    assert joint_calls.index == 1
    assert host.told == [NoRecovery("a loop was left before its end"), JointResult(0, LOOP, b"")]


def test_an_exception_outside_of_loops_gives_up_recovery():
    joint_calls, host, _ = history_with()

    def fail():
        raise ValueError("as on every worker")

    with pytest.raises(ValueError, match="as on every worker"):
        joint_calls.together("it", fail)
    assert joint_calls.index == 0
    assert host.told == [NoRecovery("an exception was raised outside of a loop")]


def test_an_exception_inside_of_a_loop_is_the_loops_own_business():
    joint_calls, host, _ = history_with()
    joint_calls.enter_loop()
    with pytest.raises(ValueError, match="caught"):
        joint_calls.together("it", lambda: (_ for _ in ()).throw(ValueError("caught")))
    assert host.told == []


def test_a_team_of_one_has_a_history_for_each_run(monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    assert context().join() is not context().join()


# With threads for workers, and a desk that decides as the launcher does.


def program(made):
    """Agree, then make a digest, then agree again; `made` counts who really took part."""

    def work(team):
        joint_calls = JointCalls(team)

        def gathered(what):
            made.append((team.world.rank, team.is_replacement, what))
            return b"".join(team.gather(b"%d" % team.world.rank, what).values())

        return [
            joint_calls.together("it", lambda what=what: gathered(what)) for what in ("a", "b", "c")
        ]

    return work


@pytest.mark.parametrize("meeting", [1, 2, 3, 4, 5, 6])
@pytest.mark.parametrize("moment", ["before", "after"])
@pytest.mark.parametrize("rank", [0, 2])
def test_a_replacement_comes_to_the_same_results(control_of, rank, meeting, moment):  # noqa: F811
    made = []
    job = Job(control_of(3), [Death(rank, meeting, moment)], replaces=True)
    results = job.run(program(made))
    # Outside of loops nobody joins; the two who are left come to the end without it.
    others = [results[other] for other in range(3) if other != rank]
    assert others == [others[0]] * 2
    assert results[rank] == others[0]
    assert not [one for one in made if one[1]]


def test_when_all_are_lost_the_first_that_has_caught_up_goes_on_alone(control_of):  # noqa: F811
    made = []
    deaths = [Death(rank, 3, "before") for rank in range(2)]
    results = Job(control_of(2), deaths, replaces=True).run(program(made))
    assert results[0] == results[1]
    assert results[0][0] == b"01"
    assert results[0][1:] in ([b"0", b"0"], [b"1", b"1"])
    assert sorted(what for _, is_replacement, what in made if is_replacement) == ["b", "c"]


def test_what_follows_a_step_that_comes_again_is_refused_until_the_next_one():
    joint_calls, _, _ = history_with()
    joint_calls.enter_loop()
    joint_calls.is_undone = True
    with pytest.raises(RuntimeError, match=r"`evaluate` must .*: write `if not step.is_done"):
        joint_calls.together("evaluate", unwanted)
    joint_calls.leave_loop(b"end")
    assert joint_calls.together("evaluate", lambda: b"all") == b"all"
