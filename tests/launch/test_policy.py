"""What follows from what, by tables; no process is started."""

from __future__ import annotations

import math
import signal
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace

import pytest
from tests.launch.test_many_workers import job_of

from unisono import launch
from unisono.errors import WorkerError
from unisono.runtime.launch import api, policy
from unisono.runtime.launch.policy import (
    Decision,
    JobState,
    KillServer,
    MarkDeparture,
    SendSignal,
    Stage,
    WorkerFailure,
    may_survive,
)
from unisono.runtime.launch.report import TRY_AGAIN, exit_status, failure_message, interrupt_message
from unisono.runtime.launch.supervise import JobResult
from unisono.runtime.workers.launcher_messages import ProgramFailed
from unisono.runtime.workers.meeting_point import Departure

Event = Callable[[JobState, float], Decision]


def reported(failure: WorkerFailure) -> Event:
    return lambda state, now: policy.failed(state, failure, now)


def done(rank: int) -> Event:
    return lambda state, now: policy.done(state, rank)


def exited(rank: int, exit_code: int, **why: str) -> Event:
    return lambda state, now: policy.exited(state, rank, exit_code, now, **why)


def left_behind(rank: int) -> Event:
    return lambda state, now: policy.left_behind(state, rank)


def server_lost(exit_code: int) -> Event:
    return lambda state, now: policy.server_lost(state, exit_code)


def interrupted(signum: int, *, gently: bool = False) -> Event:
    return lambda state, now: policy.interrupted(state, signum, now, gently=gently)


def failure(
    rank: int,
    summary: str,
    traceback: str,
    waited_for: int | None = None,
    is_disconnect: bool = False,
) -> WorkerFailure:
    said = ProgramFailed(1, summary, traceback, waited_for, is_disconnect, b"")
    return WorkerFailure(rank, 1, said)


FAILURE_0 = failure(0, "ValueError: x", "Traceback …\nValueError: x")
FAILURE_1 = failure(1, "ValueError: x", "Traceback …\nValueError: x")
DISCONNECTED = failure(1, "RuntimeError: z", "… closed by peer", is_disconnect=True)
MISSED_0 = failure(1, "PeerLostError: y", "… for 0", waited_for=0)
MISSED_1 = failure(2, "PeerLostError: y", "… for 1", waited_for=1)
ERROR_0, ERROR_1, DISCONNECT_1 = map(reported, (FAILURE_0, FAILURE_1, DISCONNECTED))
PEER_LOST_1, PEER_LOST_2_FOR_1 = map(reported, (MISSED_0, MISSED_1))
PEER_LOST_2 = reported(replace(MISSED_0, rank=2))
LEFT_0 = WorkerFailure(0, 0)


def start(workers: int, *, needs_result: bool = False) -> JobState:
    return JobState(frozenset(range(workers)), needs_result=needs_result)


def after(*events: Event, workers: int = 2, needs_result: bool = False) -> JobState:
    state = start(workers, needs_result=needs_result)
    for now, event in enumerate(events):
        state = event(state, float(now) / 100).state
    return state


FINISHED = (done(0), done(1), exited(0, 0), exited(1, 0))


@pytest.mark.parametrize(
    ("events", "status"),
    [
        (FINISHED, 0),
        ((done(0), exited(0, -6), done(1), exited(1, -6)), 0),  # gloo aborts after its work
        ((done(0), exited(0, 0), exited(1, 0)), 0),  # os._exit(0)
        ((exited(0, 0), PEER_LOST_1, exited(1, 1)), 1),
        ((done(0), exited(0, 0), PEER_LOST_1, exited(1, 1)), 1),
        ((ERROR_0, exited(0, 1), exited(1, -15)), 1),
        ((exited(1, -9), exited(0, -15)), 137),
        ((exited(1, -11), PEER_LOST_1, exited(0, 1)), 139),
        ((exited(1, 5), exited(0, -15)), 5),
        ((server_lost(-9),), 1),
        ((done(0), done(1), server_lost(-9)), 0),
        ((interrupted(2), exited(0, -15), exited(1, -15)), 130),
        ((interrupted(15), exited(0, -15), exited(1, -15)), 143),
        ((interrupted(2), server_lost(-9)), 130),
    ],
)
def test_exit_status_follows_the_first_failure(events: tuple[Event, ...], status: int) -> None:
    state = after(*events)
    assert state.over
    assert exit_status(state) == status


@pytest.mark.parametrize(
    ("events", "status"),
    [
        ((exited(1, -9), exited(0, -15)), TRY_AGAIN),
        ((PEER_LOST_1, exited(1, 1), exited(0, 0)), TRY_AGAIN),
        ((DISCONNECT_1, exited(1, 1), exited(0, -15)), TRY_AGAIN),
        ((DISCONNECT_1, ERROR_0, exited(1, 1), exited(0, 1)), 1),
        ((server_lost(-9),), TRY_AGAIN),
        ((ERROR_0, exited(0, 1), exited(1, -15)), 1),
        ((exited(1, 5), exited(0, -15)), 5),
        ((exited(1, TRY_AGAIN), exited(0, -15)), 1),
        ((interrupted(2), exited(0, -15), exited(1, -9)), 130),
        (FINISHED, 0),
    ],
)
def test_hosts_are_started_again_after_a_loss_alone(events: tuple[Event, ...], status: int) -> None:
    assert exit_status(after(*events), is_one_of_several=True) == status


def test_consequences_are_not_the_cause_even_when_they_come_first() -> None:
    assert after(PEER_LOST_1, ERROR_0).cause == FAILURE_0


@pytest.mark.parametrize(("event", "rank"), [(ERROR_0, 0), (exited(0, -9), 0)])
def test_a_lost_connection_is_not_the_cause_even_when_it_comes_first(
    event: Event, rank: int | None
) -> None:
    cause = after(DISCONNECT_1, event).cause
    assert cause is not None
    assert cause.rank == rank
    assert after(event, DISCONNECT_1).cause == cause


def test_a_lost_connection_is_the_cause_when_nothing_else_failed() -> None:
    assert after(PEER_LOST_2, DISCONNECT_1).cause == DISCONNECTED


@pytest.mark.parametrize(
    ("events", "cause"),
    [
        ((exited(0, 0), PEER_LOST_1), LEFT_0),
        ((exited(0, 0), done(1), PEER_LOST_2), LEFT_0),
        ((exited(0, 0), PEER_LOST_1, PEER_LOST_2), LEFT_0),
        ((exited(0, 0), PEER_LOST_1, PEER_LOST_2_FOR_1), LEFT_0),
        ((exited(0, 0), exited(1, -9), PEER_LOST_2), WorkerFailure(1, -9)),  # the first that harmed
        ((exited(0, 0), PEER_LOST_2_FOR_1), MISSED_1),  # nobody missed 0
        ((exited(0, 0), done(1), done(2)), None),
        ((done(0), exited(0, 0), PEER_LOST_1), MISSED_0),  # 0 came to its end
    ],
)
def test_who_left_quietly_is_to_blame_once_somebody_waits(
    events: tuple[Event, ...], cause: WorkerFailure | None
) -> None:
    assert after(*events, workers=3).cause == cause


def test_everybody_hears_of_every_departure() -> None:
    assert done(1)(start(2), 0.0).actions == (MarkDeparture(1, Departure.FINISHED),)
    assert ERROR_0(start(2), 0.0).actions == (MarkDeparture(0, Departure.FAILED),)
    assert exited(1, 0)(start(2), 0.0).actions == (MarkDeparture(1, Departure.FAILED),)
    assert exited(1, -9)(start(2), 0.0).actions == (MarkDeparture(1, Departure.FAILED),)


def test_a_failure_leads_through_all_stages_to_the_end_of_the_server() -> None:
    state = after(ERROR_0)
    seen = []
    while not state.over:
        early = policy.time_passed(state, state.due_s - 0.01)
        assert early.state == state
        decision = policy.time_passed(state, state.due_s)
        state = decision.state
        seen.append((state.stage, decision.actions))
    assert seen == [
        (Stage.TERMINATE, (SendSignal((0, 1), signal.SIGTERM),)),
        (Stage.KILL, (SendSignal((0, 1), signal.SIGKILL),)),
        (Stage.ABANDON, (KillServer(),)),
    ]


def test_an_interrupt_signals_at_once_and_a_second_one_kills() -> None:
    first = interrupted(signal.SIGINT)(start(3), 0.0)
    assert first.actions == (SendSignal((0, 1, 2), signal.SIGTERM),)
    second = interrupted(signal.SIGINT)(first.state, 0.1)
    assert second.actions == (KillServer(),)
    assert second.state.over


def test_a_gentle_interrupt_ends_nobody_until_all_is_done() -> None:
    gently = interrupted(signal.SIGINT, gently=True)(start(2), 0.0)
    assert gently.actions == ()
    assert (gently.state.stage, gently.state.due_s) == (Stage.RUNNING, math.inf)
    now = policy.end_now(gently.state, 5.0)
    assert now.actions == (SendSignal((0, 1), signal.SIGTERM),)
    assert policy.end_now(now.state, 5.1).actions == ()
    again = interrupted(signal.SIGINT)(gently.state, 0.1)
    assert again.actions == (KillServer(),)


def test_a_job_that_is_ending_already_is_not_ended_gently() -> None:
    decision = interrupted(signal.SIGINT, gently=True)(after(ERROR_0), 0.1)
    assert decision.actions == (SendSignal((0, 1), signal.SIGTERM),)


@pytest.mark.parametrize(
    ("events", "exit_code", "survives"),
    [
        ((), -9, True),
        ((), -11, True),
        ((), 1, False),
        ((), 0, False),
        ((done(1),), -6, False),  # it had finished
        ((done(0),), -9, True),
        ((ERROR_1,), -9, False),
        ((ERROR_0,), -9, False),  # the job is ending
        ((interrupted(2),), -15, False),
        ((interrupted(2, gently=True),), -9, True),
    ],
)
def test_others_may_go_on_after_a_kill_in_the_midst_of_work(
    events: tuple[Event, ...], exit_code: int, survives: bool
) -> None:
    assert may_survive(after(*events), 1, exit_code) is survives


def test_a_worker_left_behind_is_no_failure() -> None:
    state = after(left_behind(1), done(0), exited(0, 0))
    assert state.over
    assert exit_status(state) == 0


def test_what_kept_others_from_going_on_is_told() -> None:
    state = after(exited(1, -9, note="3 workers were lost within 60 s"))
    assert failure_message(state, 2).endswith(
        "It could not be replaced: 3 workers were lost within 60 s."
    )


def test_what_is_known_better_than_from_the_status_is_told() -> None:
    how = "was ended, as it stood still for 60 s"
    state = after(exited(1, -9, note="`--restarts` is 0", how=how))
    assert failure_message(state, 2) == (
        f"worker 1 of 2 {how}; the others were ended. It could not be replaced: `--restarts` is 0."
    )
    assert exit_status(state) == 137


def test_a_message_that_would_fill_the_terminal_is_cut_at_the_top() -> None:
    message = f"KeyError: {'x' * 9999}"
    traceback = "Traceback …\n" + "  File …\n" * 9 + message
    said = failure_message(after(reported(failure(0, message, traceback))), 2)
    head, told = said.split("\n\n")
    assert head.splitlines()[0] == f"{message[:480]} …"
    assert told == traceback


@pytest.mark.parametrize(
    ("events", "words"),
    [
        ((ERROR_0, PEER_LOST_1), "It was raised on worker 0 of 2; the others were ended:\n\n"),
        ((ERROR_0, ERROR_1), "It was raised on worker 0 of 2 (the same on rank 1):\n\n"),
        ((exited(1, -9),), "worker 1 of 2 was killed by SIGKILL (most often the system ran out"),
        ((exited(1, -11),), "killed by SIGSEGV (a segmentation fault"),
        ((exited(1, -40),), "was killed by signal 40"),
        ((exited(0, 7),), "worker 0 of 2 left with exit status 7; the others were ended."),
        ((server_lost(-9),), "the process that starts the workers must live as long as they do"),
        ((done(0), DISCONNECT_1), "Worker 0 had come to the end of the program by then: every"),
    ],
)
def test_messages_name_rank_and_cause(events: tuple[Event, ...], words: str) -> None:
    assert words in failure_message(after(*events), 2)


@pytest.mark.parametrize(
    ("events", "needs_result", "words"),
    [
        (
            (exited(0, 0), PEER_LOST_1),
            False,
            "worker 0 of 3 left with exit status 0 in the middle of its program (by `os._exit`?) "
            "while worker 1 waited for it: every worker must",
        ),
        ((exited(0, 0),), True, "in the middle of its program (by `os._exit`?): every worker"),
        (
            (done(0), exited(0, 0), PEER_LOST_2, PEER_LOST_1),
            False,
            "worker 0 of 3 finished its program while workers 1, 2 waited for it: every worker "
            "must come to the end of its program and make the same calls in the same order. "
            "Worker 2 waited here:\n\n… for 0",
        ),
    ],
)
def test_who_left_and_who_waited_are_both_told(
    events: tuple[Event, ...], needs_result: bool, words: str
) -> None:
    assert words in failure_message(after(*events, workers=3, needs_result=needs_result), 3)


GENTLY = interrupted(15, gently=True)


@pytest.mark.parametrize(
    ("events", "is_told"),
    [
        ((GENTLY, ERROR_0), True),
        ((ERROR_0, interrupted(2)), True),
        ((GENTLY, PEER_LOST_1, ERROR_0, exited(0, 1), exited(1, 1)), True),
        # what follows from the signal
        ((interrupted(15), exited(0, -15), exited(1, -15)), False),
        ((interrupted(15), ERROR_0), False),  # the program's handler may raise anything
        ((GENTLY, exited(0, -9), exited(1, -9)), False),
        ((GENTLY, DISCONNECT_1), False),
        ((GENTLY, PEER_LOST_1), False),
        ((GENTLY, done(0), done(1)), False),
    ],
)
def test_an_exception_is_told_though_a_signal_was_to_end_the_job(
    events: tuple[Event, ...], is_told: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    state, said = after(*events), list[str]()
    signum = state.interrupted_by or 0
    ended = JobResult(state, {}, server_is_usable=False)
    server = SimpleNamespace(kill=lambda: None)
    monkeypatch.setattr(api, "ForkServer", SimpleNamespace(start=lambda environ: server))
    monkeypatch.setattr(api, "supervise", lambda *_: ended)
    monkeypatch.setattr(api, "_supervised", lambda job: ended)
    monkeypatch.setattr(api, "adopt_orphans", lambda: None)
    monkeypatch.setattr(api, "kill_below", lambda pid: None)
    monkeypatch.setattr(api, "say", said.append)
    assert api.run(job_of(2)) == 128 + signum
    assert [FAILURE_0.said.traceback in text for text in said] == [False, True][: 1 + is_told]
    with pytest.raises((KeyboardInterrupt, SystemExit)) as raised:
        launch(print, workers=2)
    assert isinstance(raised.value.__cause__, WorkerError) is is_told
    assert len(said) == 1 + is_told + (is_told and signum == signal.SIGTERM)


def test_an_interrupt_is_told_in_one_line() -> None:
    state = replace(start(2), interrupted_by=signal.SIGINT)
    assert interrupt_message(state, 2) == "interrupted by Ctrl-C; all 2 workers were ended."
