"""What is said when workers are lost and when replacements join, word by word."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest

from unisono.runtime.launch import recovery
from unisono.runtime.launch.report import ending, joined_message, loss_message
from unisono.runtime.workers.launcher_messages import LoopBegan, Ready
from unisono.runtime.workers.membership import Membership

KILLED = (
    "was killed by SIGKILL (most often the system ran out of memory: use a smaller batch or "
    + ("fewer workers, and look into the system's log)")
)


Event = Callable[[recovery.RecoveryState], recovery.RecoveryDecision]


def state_after(*before: Event, workers: int, replaces: bool = True) -> recovery.RecoveryState:
    state = recovery.RecoveryState(
        Membership.of(workers), world_size=workers, restarts=9, replaces=replaces
    )
    for event in (partial(recovery.received, rank=0, message=Ready()), *before):
        state = event(state).state
    return state


LOOP = partial(recovery.received, rank=0, message=LoopBegan(0, {}))


def lost(rank: int) -> Event:
    return partial(recovery.lost, rank=rank, now=0.0)


@pytest.mark.parametrize(
    ("workers", "before", "replaces", "rank", "message"),
    [
        (3, [LOOP], True, 1, " in step 41; workers 0 and 2 continue; a replacement is starting."),
        (3, [LOOP], False, 2, " in step 41; workers 0 and 1 continue; it is not replaced."),
        # a second one, before the first is replaced
        (
            *(3, [LOOP, lost(0)], True, 2),
            " in step 41; worker 1 continues; a replacement is starting.",
        ),
        # outside of loops
        (3, [], True, 1, "; workers 0 and 2 continue; a replacement is starting."),
        # the last one
        (
            *(1, [LOOP], True, 0),
            " in step 41; nobody is left; a replacement is starting.",
        ),
        # a replacement that was still catching up
        (
            *(2, [LOOP, lost(1), lost(0)], True, 1),
            " before it had joined the others; a replacement is starting.",
        ),
    ],
)
def test_a_loss_names_who_was_lost_and_who_goes_on(
    workers: int, before: list[Event], replaces: bool, rank: int, message: str
) -> None:
    known = state_after(*before, workers=workers, replaces=replaces)
    after = lost(rank)(known).state
    said = loss_message(rank, 4711, ending(-9), 41, known, after)
    assert said == f"worker {rank} (pid 4711) {KILLED}{message}"


def test_a_worker_that_is_killed_on_purpose_has_not_run_out_of_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("UNISONO_FAULTS", "kill:rank=1,step=30")
    assert ending(-9) == "was killed by SIGKILL (as UNISONO_FAULTS is set)"


def test_who_joins_is_named() -> None:
    state = state_after(LOOP, workers=4)
    assert joined_message({1: 101}, state) == "worker 1 (pid 101) has joined."
    assert joined_message({1: 101, 3: 103}, state) == (
        "workers 1 (pid 101) and 3 (pid 103) have joined."
    )
