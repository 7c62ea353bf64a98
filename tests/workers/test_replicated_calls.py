"""What workers have done together, and how a replacement catches up with it."""

import pytest
from tests.promises import promise
from tests.workers.fake_launcher import Death, Job

from unisono.errors import PeerLostError
from unisono.runtime.workers.context import context
from unisono.runtime.workers.control_block import ControlBlock
from unisono.runtime.workers.launcher_messages import (
    LOOP,
    LoopBegan,
    NoRecovery,
    Passed,
    ReplicatedResult,
)
from unisono.runtime.workers.replicated_calls import ReplicatedCalls
from unisono.runtime.workers.supervisor import Supervisor
from unisono.runtime.workers.team import Team
from unisono.runtime.world import World


class Recorder(Supervisor):
    """Notes what it is told and answers from a list."""

    can_replace = True

    def __init__(self):
        self.world = World()
        self.control = ControlBlock(-1, 1)
        self.told = []

    def memory(self, key, num_bytes, gather):
        raise AssertionError("no memory is wanted")

    def notify(self, message):
        self.told.append(message)


def recorded():
    recorder = Recorder()
    return ReplicatedCalls(Team(recorder)), recorder


@promise("where-it-ends.2")
def test_a_loop_inside_of_a_loop_gives_up_recovery():
    replicated_calls, host = recorded()
    replicated_calls.enter_loop()
    replicated_calls.note_loop({"outer": 1})
    assert replicated_calls.enter_loop() is None
    replicated_calls.note_loop({"inner": 1})
    replicated_calls.leave_loop(b"inner")
    assert replicated_calls.index == 0
    replicated_calls.leave_loop(b"outer")
    assert host.told == [
        LoopBegan(0, {"outer": 1}),
        NoRecovery("one loop over steps runs inside of another"),
        ReplicatedResult(0, LOOP, b"outer"),
    ]


@promise("where-it-ends.3")
def test_a_loop_that_is_left_before_its_end_gives_up_recovery():
    replicated_calls, host = recorded()
    replicated_calls.enter_loop()
    replicated_calls.leave_loop(None)
    assert replicated_calls.index == 1
    assert host.told == [
        NoRecovery("a loop was left before its end"),
        ReplicatedResult(0, LOOP, b""),
    ]


def raises(error):
    raise error


@promise("conditions.1")
def test_an_exception_outside_of_loops_is_the_outcome_of_its_call(monkeypatch):
    replicated_calls, host = recorded()
    with pytest.raises(ValueError, match="as on every worker"):
        replicated_calls.together("it", lambda: raises(ValueError("as on every worker")))
    assert replicated_calls.index == 1
    (outcome,) = host.told
    replicated_calls, host = recorded()
    monkeypatch.setattr(replicated_calls, "is_behind", True)
    monkeypatch.setattr(host, "catch_up", lambda *_: Passed(outcome.payload), raising=False)
    with pytest.raises(ValueError, match="as on every worker"):
        replicated_calls.together("it", lambda: raises(AssertionError("is not made again")))
    assert (replicated_calls.index, host.told) == (1, [])


@pytest.mark.parametrize("error", [KeyboardInterrupt(), PeerLostError("gone", rank=1)])
def test_an_exception_that_not_all_workers_raise_gives_up_recovery(error):
    replicated_calls, host = recorded()
    with pytest.raises(type(error)):
        replicated_calls.together("it", lambda: raises(error))
    assert isinstance(host.told[0], NoRecovery)


def test_an_exception_inside_of_a_loop_is_the_loops_own_business():
    replicated_calls, host = recorded()
    replicated_calls.enter_loop()
    with pytest.raises(ValueError, match="caught"):
        replicated_calls.together("it", lambda: (_ for _ in ()).throw(ValueError("caught")))
    assert host.told == []


def test_a_team_of_one_has_a_history_for_each_run(monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    assert context().join() is not context().join()


# With threads for workers, and a launcher that decides as the launcher does.


def program(made):
    """Agree, then make a digest, then agree again; `made` counts who really took part."""

    def work(team):
        replicated_calls = ReplicatedCalls(team)

        def gathered(what):
            made.append((team.world.rank, team.is_replacement, what))
            return b"".join(team.gather(b"%d" % team.world.rank, what).values())

        return [
            replicated_calls.together("it", lambda what=what: gathered(what))
            for what in ("a", "b", "c")
        ]

    return work


@pytest.mark.parametrize("meeting", [1, 2, 3, 4, 5, 6])
@pytest.mark.parametrize("moment", ["before", "after"])
@pytest.mark.parametrize("rank", [0, 2])
def test_a_replacement_comes_to_the_same_results(control_of, rank, meeting, moment):
    made = []
    job = Job(control_of(3), [Death(rank, meeting, moment)], replaces=True)
    results = job.run(program(made))
    # Outside of loops nobody joins; the two who are left come to the end without it.
    others = [results[other] for other in range(3) if other != rank]
    assert others == [others[0]] * 2
    assert results[rank] == others[0]
    assert not [one for one in made if one[1]]


def test_when_all_are_lost_the_first_that_has_caught_up_goes_on_alone(control_of):
    made = []
    deaths = [Death(rank, 3, "before") for rank in range(2)]
    results = Job(control_of(2), deaths, replaces=True).run(program(made))
    assert results[0] == results[1]
    assert results[0][0] == b"01"
    assert results[0][1:] in ([b"0", b"0"], [b"1", b"1"])
    assert sorted(what for _, is_replacement, what in made if is_replacement) == ["b", "c"]
