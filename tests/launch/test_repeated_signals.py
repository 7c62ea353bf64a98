"""Which of several signals is a new one? The launcher's loop, with a clock of the test's own."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from unisono.runtime.launch import supervise
from unisono.runtime.launch.job import SCRIPT, Job
from unisono.runtime.launch.policy import Stage
from unisono.runtime.launch.report import exit_status
from unisono.runtime.signals import AGENT_ENDED, ENDING_SIGNALS, interrupts, signals_as_bytes
from unisono.runtime.workers.channel import Channel
from unisono.runtime.workers.launcher_messages import Forked

INT, TERM, USR1, HUP = signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP
ON_ONE, OF_SEVERAL = (), (2, 2)
assert AGENT_ENDED == HUP


class Told:
    """The signals that the launcher finds when it looks. Final."""

    def __init__(self) -> None:
        self.new: list[int] = []
        self._reading, self._writing = socket.socketpair()

    def fileno(self) -> int:
        return self._reading.fileno()

    def read(self) -> list[int]:
        new, self.new = self.new, []
        return new

    def tell(self, signum: int) -> None:
        self.new.append(signum)
        self._writing.send(b"s")

    def close(self) -> None:
        self._reading.close()
        self._writing.close()


def job_on(hosts: tuple[int, ...]) -> Job:
    return Job(
        kind=SCRIPT,
        target="train.py",
        environ={},
        num_workers=2,
        threads=1,
        restarts=3,
        replaces=True,
        stall_timeout_s=60.0,
        backend="gloo",
        hosts=hosts,
    )


@pytest.fixture
def told() -> Iterator[Told]:
    signals = Told()
    yield signals
    signals.close()


def test_a_signal_that_arrives_while_handlers_change_is_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    set_handler = signal.signal

    def arrive(signum: int, handler: Any) -> Any:
        before = set_handler(signum, handler)
        if signum == TERM:
            signal.raise_signal(signum)
        return before

    set_handler(TERM, lambda signum, frame: None)  # what the last one is for
    monkeypatch.setattr(signal, "signal", arrive)
    try:
        with signals_as_bytes(ENDING_SIGNALS) as signals:
            assert signals.read() == [TERM]
    finally:
        set_handler(TERM, signal.SIG_DFL)


@pytest.mark.parametrize(
    ("hosts", "finishes_step", "signals", "stage"),
    [
        # In a loop over steps, a notice waits for the step under way.
        (ON_ONE, True, [(TERM, 0.0)], Stage.RUNNING),
        (ON_ONE, True, [(TERM, 0.0), (TERM, 0.1)], Stage.RUNNING),  # to all, and by the agent
        (ON_ONE, True, [(USR1, 0.0), (TERM, 1.9)], Stage.RUNNING),
        (ON_ONE, True, [(HUP, 0.0), (HUP, 0.0)], Stage.RUNNING),  # of the kernel and a shell
        (ON_ONE, True, [(INT, 0.0), (INT, 2.1)], Stage.ABANDON),
        (OF_SEVERAL, True, [(TERM, 0.0), (TERM, 0.1)], Stage.RUNNING),
        # An agent that has ended has nobody wait, and is not a second notice.
        (OF_SEVERAL, True, [(HUP, 0.0)], Stage.TERMINATE),
        (OF_SEVERAL, True, [(HUP, 0.0), (HUP, 0.1)], Stage.TERMINATE),
        (OF_SEVERAL, True, [(HUP, 0.0), (TERM, 0.1)], Stage.TERMINATE),
        (OF_SEVERAL, True, [(HUP, 0.0), (HUP, 2.1)], Stage.ABANDON),
        (OF_SEVERAL, True, [(TERM, 0.0), (HUP, 0.1)], Stage.ABANDON),
        (OF_SEVERAL, True, [(TERM, 0.0), (HUP, 0.1), (HUP, 0.2)], Stage.ABANDON),
        # Elsewhere, the first one ends the workers.
        (ON_ONE, False, [(TERM, 0.0), (TERM, 0.1)], Stage.TERMINATE),
        (ON_ONE, False, [(TERM, 0.0), (TERM, 2.1)], Stage.ABANDON),
    ],
    ids=str,
)
def test_a_signal_that_is_told_twice_counts_once(
    monkeypatch: pytest.MonkeyPatch,
    told: Told,
    hosts: tuple[int, ...],
    finishes_step: bool,
    signals: list[tuple[int, float]],
    stage: Stage,
) -> None:
    clock = SimpleNamespace(now=100.0)
    monkeypatch.setattr(supervise, "time", SimpleNamespace(monotonic=lambda: clock.now))
    ours, theirs = Channel.pair()
    done: list[str] = []
    server = SimpleNamespace(
        channel=ours, signal=lambda *_: done.append("signal"), kill=lambda: done.append("kill")
    )
    supervision = supervise._Supervision(server, job_on(hosts), told)  # type: ignore[arg-type]
    monkeypatch.setattr(supervision._requests, "request_stop", lambda signum: finishes_step)
    try:
        for signum, after_s in signals:
            clock.now, told.new = 100.0 + after_s, [signum]
            supervision._read_signals()
        assert supervision.state.stage is stage
        assert supervision.state.interrupted_by == signals[0][0]
        assert ("kill" in done) == (stage is Stage.ABANDON)
    finally:
        supervision.close()
        ours.close()
        theirs.close()


def test_a_killed_server_is_not_read_any_more(told: Told, monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = Channel.pair()
    server = SimpleNamespace(channel=ours, signal=lambda *_: None, kill=ours.close)
    supervision = supervise._Supervision(server, job_on(ON_ONE), told)  # type: ignore[arg-type]
    monkeypatch.setattr(supervision._requests, "request_stop", lambda signum: True)
    monkeypatch.setattr(supervise, "ONE_SIGNAL_S", -1.0)  # each signal is a new one
    try:
        told.new.append(INT)
        supervision._read_signals()
        told.tell(INT)
        theirs.send(Forked(0, os.getpid()))  # in the same wake-up
        supervision.watch()
        assert exit_status(supervision.state) == 128 + INT
    finally:
        supervision.close()
        ours.close()
        theirs.close()


@pytest.mark.parametrize("own", [signal.SIG_IGN, lambda signum, frame: None], ids=["&", "own"])
def test_a_launch_receives_notices_though_ctrl_c_is_not_its_own(own: Any) -> None:
    """A shell ignores Ctrl-C for what it starts in the background; SIGTERM ended that at once."""
    before = signal.signal(INT, own)
    try:
        with interrupts() as signals:
            assert signal.getsignal(INT) is own
            assert signal.getsignal(TERM) is not signal.SIG_DFL
            signal.raise_signal(TERM)
            assert signals is not None
            assert signals.read() == [TERM]
    finally:
        signal.signal(INT, before)
