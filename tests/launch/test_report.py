"""What is said when workers are lost and when replacements join, word by word."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from unisono.runtime.launch import recovery
from unisono.runtime.launch.report import ending, joined_message, loss_message
from unisono.runtime.workers.launcher_messages import LoopBegan, Membership, Ready

KILLED = (
    "was killed by SIGKILL (most often the system ran out of memory: use a smaller batch or "
    + ("fewer workers, and look into the system's log)")
)


Event = Callable[[recovery.RecoveryState], recovery.RecoveryDecision]


def state_after(*before: Event, workers: int, replaces: bool = True) -> recovery.RecoveryState:
    state = recovery.RecoveryState(
        Membership.of(workers), world_size=workers, restarts=9, replaces=replaces
    )
    for event in (partial(recovery.said, rank=0, message=Ready()), *before):
        state = event(state).state
    return state


def loop(num_shards: int, *, by_speed: bool = False) -> Event:
    facts: dict[str, Any] = {"shards": num_shards, "by speed": by_speed}
    return partial(recovery.said, rank=0, message=LoopBegan(0, facts))


def lost(rank: int) -> Event:
    return partial(recovery.lost, rank=rank, now=0.0)


@pytest.mark.parametrize(
    ("workers", "before", "replaces", "rank", "message"),
    [
        (
            3,
            [loop(8)],
            True,
            1,
            "in step 41 with shards 3–5; workers 0 and 2 go on with shards 0–3, shards 4–7; "
            "a replacement is starting.",
        ),
        (
            3,
            [loop(3)],
            False,
            2,
            "in step 41 with shard 2; workers 0 and 1 go on with shards 0–1, shard 2; "
            "it is not replaced.",
        ),
        # a second one, before the first is replaced
        (
            3,
            [loop(8), lost(0)],
            True,
            2,
            "in step 41 with shards 4–7; worker 1 goes on with shards 0–7; "
            "a replacement is starting.",
        ),
        # by the speed of devices, which the launcher does not know
        (
            3,
            [loop(8, by_speed=True)],
            True,
            1,
            "in step 41; workers 0 and 2 go on; a replacement is starting.",
        ),
        # outside of loops nobody holds shards
        (3, [], True, 1, "; workers 0 and 2 go on; a replacement is starting."),
        # the last one
        (
            1,
            [loop(8)],
            True,
            0,
            "in step 41 with shards 0–7; nobody is left; a replacement is starting, from the "
            "latest snapshot.",
        ),
        # a replacement that was still catching up
        (
            2,
            [loop(8), lost(1), lost(0)],
            True,
            1,
            "before it had joined the others; a replacement is starting.",
        ),
    ],
)
def test_a_loss_names_who_was_lost_and_who_goes_on_with_what(
    workers: int, before: list[Event], replaces: bool, rank: int, message: str
) -> None:
    known = state_after(*before, workers=workers, replaces=replaces)
    after = lost(rank)(known).state
    said = loss_message(rank, 4711, ending(-9), 41, known, after)
    space = "" if message.startswith(";") else " "
    assert said == f"worker {rank} (pid 4711) {KILLED}{space}{message}"


@pytest.mark.parametrize(
    ("workers", "before", "ranks", "message"),
    [
        (3, [loop(8)], (1,), "worker 1 (pid 101) has joined with shards 3–5."),
        (
            4,
            [loop(4)],
            (1, 2, 3),
            "workers 1 (pid 101), 2 (pid 102) and 3 (pid 103) have joined with shard 1, shard 2, "
            "shard 3.",
        ),
        (2, [], (1,), "worker 1 (pid 101) has joined."),
        (3, [loop(8, by_speed=True)], (1,), "worker 1 (pid 101) has joined."),
        # alone
        (2, [loop(8), lost(1)], (0,), "worker 0 (pid 100) has joined with shards 0–7."),
    ],
)
def test_who_joins_is_named_with_its_shards(
    workers: int, before: list[Event], ranks: tuple[int, ...], message: str
) -> None:
    state = state_after(*before, workers=workers)
    assert joined_message(ranks, lambda rank: 100 + rank, state) == message
