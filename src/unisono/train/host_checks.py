"""May workers be on several hosts here, and do their shards suit them? Said before a loop."""

from __future__ import annotations

from unisono.plan.hosts import parts_of_hosts, shards_for_hosts
from unisono.workers.team import Team


def check_hosts(team: Team) -> None:
    """Refuse what is not there yet where workers are on several hosts.

    Raises:
        ValueError: something does not fit.
    """
    if len(team.hosts) > 1 and team.num_stages > 1:
        raise ValueError(
            "`UNISONO_STAGES` must be 1 where workers are on several hosts, as the stages of a "
            "model share memory: unset it, or start all workers on one host."
        )


def told_hosts(team: Team, num_shards: int) -> str:
    """Say in a sentence that another number of shards would send less; empty where none would."""
    workers = list(map(len, team.hosts))
    if len(workers) == 1:
        return ""
    most = max(parts_of_hosts(num_shards, workers))
    if most == 1:
        return ""
    told = (
        f"with `shards={num_shards}` on hosts with {', '.join(map(str, workers))} workers a host "
        f"sends {most} parts of the gradients a step, {(most + 1) / 2:g} times the bytes that one "
        f"part would take"
    )
    better = shards_for_hosts(num_shards, workers)
    if better is None:
        return f"{told}: hosts with equally many workers would send less"
    return f"{told}: pass `shards={better}`, which changes the result as any other number does"
