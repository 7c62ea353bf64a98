"""How long did the stages of a model wait for each other? Measured, and what is expected."""

from __future__ import annotations

import json
from collections.abc import Mapping

from unisono.plan.pipeline import expected_bubble
from unisono.step.staged_engine import StagedEngine
from unisono.train.run_context import RunContext


def tell_bubble(run: RunContext, engine: StagedEngine) -> None:
    """Say at the end of a loop how long stages waited within steps. Collective."""
    team, stages = run.team, engine.stages
    mine = json.dumps([stages.busy_s, stages.passes_s]).encode()
    heard = team.gather(mine, "waits of the stages")
    if not team.is_leader or not stages.passes_s:
        return
    seconds = {rank: json.loads(message) for rank, message in heard.items()}
    num_shards, in_flight = len(engine.passes.shards), run.options.shards_in_flight
    expected = expected_bubble(num_shards, team.num_stages, in_flight)
    run.say(
        f"pipeline of {team.num_stages} stages, {num_shards} shards for each replica: they waited "
        f"for each other in {measured_bubble(seconds, team.num_stages):.0%} of their time "
        f"({expected:.0%} if all took equally long)"
    )


def measured_bubble(seconds: Mapping[int, tuple[float, float]], num_stages: int) -> float:
    """Give the part of the time in which stages had nothing to do.

    Args:
        seconds: by rank, how long its passes took without waits, and with them. The stages of a
            replica, which are neighbours, begin together; the last of them to end says how long all
            took.
        num_stages: how many stages a replica has.
    """
    busy_s = all_s = 0.0
    for replica in {rank // num_stages for rank in seconds}:
        own = [seconds[rank] for rank in seconds if rank // num_stages == replica]
        busy_s += sum(busy for busy, _ in own)
        all_s += len(own) * max(passes for _, passes in own)
    return 1 - busy_s / all_s if all_s else 0.0
