"""Where does a run resume when it is started again? The leader looks, and everybody follows."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from typing import Any

from unisono.errors import CheckpointError
from unisono.state.saved import Snapshot, bytes_at_most
from unisono.train.checkpoints import Checkpoints, FoundCheckpoint
from unisono.train.failures import heard_by_all
from unisono.train.host_directories import settle_directory
from unisono.train.identity import SAMPLES, identity
from unisono.train.loop_plan import LoopPlan
from unisono.train.order import samples_seen
from unisono.train.run_context import RunContext


def resume(run: RunContext, plan: LoopPlan) -> None:
    """Resume from the newest checkpoint, at the first loop that it is not ahead of.

    If it was made in a later loop, what this one ended with is put back, for what the program does
    before the next; if that is not kept, the newest, as far as it fits.

    Collective: every rank calls it.

    Raises:
        ValueError: another run of this program has begun in the directory.
        CheckpointError: the run was another one, or its state does not fit this model.
    """
    checkpoints, kept = run.checkpoints, run.kept
    if checkpoints is None:
        return
    if run.has_resumed:
        checkpoints.take_turn()
        return
    kept.given.look()
    settle_directory(run)
    found: FoundCheckpoint | None = None

    def find() -> dict[str, Any]:
        nonlocal found
        answer, found = _find(run, checkpoints, plan)
        return answer

    (answer,) = heard_by_all(
        lambda speak: [run.joint_calls.hear_leader(speak, "taking up")], find, run.team.world.rank
    )
    checkpoints.go_to(answer["directory"])
    checkpoints.begin(None)
    is_ahead: bool = answer.get("is_ahead", False)
    if "path" in answer:
        plan.samples = replace(plan.samples, shards=answer["shards"])
        kept.position.move_to(**answer["position"])
        kept.last = answer["last"]
        checkpoints.begin(kept.position.step)
        snapshot = None if found is None else found.snapshot
        _put_back(run, checkpoints, answer["path"], snapshot, is_ahead=is_ahead)
        if not is_ahead:
            run.plan = plan.samples
    run.is_ahead, run.has_resumed = is_ahead, not is_ahead


def _find(
    run: RunContext, checkpoints: Checkpoints, plan: LoopPlan
) -> tuple[dict[str, Any], FoundCheckpoint | None]:
    """Look, as the leader; give what the others need to know, and what was found."""
    kept = run.kept
    here = identity(plan.samples, run.fixed, run.device, is_kept=True)
    here[SAMPLES] = samples_seen(run, plan).facts
    if run.shards is None:
        del here["shards"]  # the checkpoint's are taken
    try:
        found = checkpoints.find(
            plan.samples, plan.totals, here, bytes_at_most(kept.model), run.loop
        )
    except OSError as error:
        raise CheckpointError(
            f"`directory` must be a folder that can be read and written, or that can be made, but "
            f"“{error}”: pass another one, or make room for it."
        ) from None
    answer: dict[str, Any] = {"directory": str(checkpoints.directory)}
    if found is None:
        return answer, None
    facts = found.snapshot.facts
    if not run.is_ahead:  # else all has been said
        for line in kept.given.told(facts["given"]):
            run.say(line)
    answer |= {name: facts[name] for name in ("position", "last")}
    answer |= {"path": found.path, "is_ahead": found.is_ahead}
    shards = facts["identity"].get("shards")
    return answer | {"shards": shards if type(shards) is int else plan.samples.shards}, found


def _put_back(
    run: RunContext,
    checkpoints: Checkpoints,
    path: str,
    snapshot: Snapshot | None,
    *,
    is_ahead: bool,
) -> None:
    """Take over the state in a checkpoint, which the leader has read already."""
    try:
        snapshot = checkpoints.read(path) if snapshot is None else snapshot
    except CheckpointError:
        # A replacement that comes late takes the state from the others.
        if not run.team.is_replacement:
            raise
        return
    # Until that later loop the program may still add to its optimizer, say.
    with contextlib.suppress(*[CheckpointError] * is_ahead):
        run.kept.apply(snapshot)
        run.kept.given.take(snapshot.facts["given"])
