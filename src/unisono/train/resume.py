"""Where does a run go on from when it is started again? The leader looks, and everybody follows."""

from __future__ import annotations

import contextlib
import json
from enum import Enum, auto
from typing import Any

from unisono.errors import CheckpointError
from unisono.plan.samples import SamplePlan
from unisono.state.run_state import RunState
from unisono.state.saved import bytes_at_most
from unisono.train.checkpoints import Checkpoints, FoundCheckpoint
from unisono.train.totals import Totals
from unisono.workers.joint_calls import JointCalls
from unisono.workers.team import Team


class Resumption(Enum):
    """What a run has found to go on from."""

    NOTHING = auto()
    HERE = auto()
    AHEAD = auto()  # of a later loop


def take_up(
    checkpoints: Checkpoints,
    kept: RunState,
    plan: SamplePlan,
    totals: Totals,
    identity: dict[str, Any],
    team: Team,
    joint_calls: JointCalls,
    *,
    is_first: bool,
) -> Resumption:
    """Go on from the newest checkpoint, if there is one. Collective: every rank calls it.

    One that was made in a later loop is put back as far as it fits, for what the program does
    before that loop; there it has to be taken up again, as if nothing had been done in between.

    Args:
        checkpoints: where to look.
        kept: what is put back.
        plan: which samples are computed where.
        totals: how far the loop that is about to begin goes.
        identity: the run's.
        team, joint_calls: the workers, and what they have done together.
        is_first: whether nothing was found before; else all has been said.

    Returns:
        What was found.

    Raises:
        ValueError: another run of this program has begun in the directory.
        CheckpointError: the run was another one, or its state does not fit this model.
    """
    found: FoundCheckpoint | None = None
    kept.given.look()

    def speak() -> bytes:
        nonlocal found
        try:
            found = checkpoints.find(plan, totals, identity, bytes_at_most(kept.model))
        except OSError as error:
            trouble = (
                f"`directory` must be a folder that can be read and written, or that can be "
                f"made, but “{error}”: pass another one, or make room for it."
            )
            return json.dumps({"error": trouble}).encode()
        except CheckpointError as error:
            return json.dumps({"error": str(error)}).encode()
        except ValueError as error:
            return json.dumps({"mistake": str(error)}).encode()
        where = {"directory": str(checkpoints.directory)}
        if found is None:
            return json.dumps(where).encode()
        facts = found.snapshot.facts
        if is_first:
            for line in kept.given.told(facts["given"]):
                checkpoints.say(line)
        told = {name: facts[name] for name in ("position", "last")}
        told |= {"path": found.path, "is_ahead": found.is_ahead}
        return json.dumps({**where, **told}).encode()

    heard = joint_calls.together("taking up", lambda: team.hear_leader(speak, "taking up"))
    answer = json.loads(heard)
    if "error" in answer:
        raise CheckpointError(answer["error"])
    if "mistake" in answer:
        raise ValueError(answer["mistake"])
    checkpoints.go_to(answer["directory"])
    checkpoints.begin(None)
    if "path" not in answer:
        return Resumption.NOTHING
    kept.position.move_to(**answer["position"])
    kept.last = answer["last"]
    checkpoints.begin(kept.position.step)
    is_ahead: bool = answer["is_ahead"]
    try:
        snapshot = found.snapshot if found is not None else checkpoints.read(answer["path"])
    except CheckpointError:
        # A replacement that comes late takes the state from the others.
        if not team.is_replacement:
            raise
    else:
        # Until that later loop the program may still add to its optimizer, say.
        with contextlib.suppress(*[CheckpointError] * is_ahead):
            kept.apply(snapshot)
            kept.given.take(snapshot.facts["given"])
    return Resumption.AHEAD if is_ahead else Resumption.HERE
