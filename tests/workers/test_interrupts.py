"""Signals that arrive while a loop installs or removes their handlers."""

from __future__ import annotations

import signal
from types import SimpleNamespace
from typing import Any

import pytest

from unisono.runtime.signals import BETWEEN, ENDING_SIGNALS, IN_LOOP
from unisono.runtime.workers import interrupts
from unisono.runtime.workers.interrupts import Interrupts

TERM = signal.SIGTERM


@pytest.mark.parametrize(("arrives", "said"), [("begins", BETWEEN), ("ends", IN_LOOP)])
def test_a_signal_is_recorded_while_its_handler_changes(
    monkeypatch: pytest.MonkeyPatch, arrives: str, said: str
) -> None:
    recorder, lines, passed_on = Interrupts(), list[str](), list[int]()
    monkeypatch.setattr(interrupts.atexit, "register", lambda *_: None)
    set_handler, before = signal.signal, signal.getsignal(TERM)

    def arrive(signum: int, handler: Any) -> Any:
        if signum == TERM and handler is not recorder and arrives == "ends":
            signal.raise_signal(signum)
        found = set_handler(signum, handler)
        if signum == TERM and handler is recorder and arrives == "begins":
            signal.raise_signal(signum)
        return found

    def pass_on(signum: int) -> bool:
        passed_on.append(signum)
        return True

    team: Any = SimpleNamespace(pass_on=pass_on)
    monkeypatch.setattr(signal, "signal", arrive)
    try:
        with recorder.in_loop(team, lines.append, str):
            if arrives == "ends":
                recorder._put_back([TERM])
    finally:
        recorder._put_back(ENDING_SIGNALS)
    assert passed_on == [TERM]
    assert lines[0].startswith(said)
    assert signal.getsignal(TERM) is before
