"""Where does a run go on from when it is started again? The lead looks, and everybody follows."""

from __future__ import annotations

import json
from typing import Any

from unisono.comm.history import History
from unisono.comm.team import Team
from unisono.errors import CheckpointError
from unisono.plan.samples import SamplePlan
from unisono.train.checkpoints import Checkpoints, Found
from unisono.train.kept import Kept


def take_up(
    checkpoints: Checkpoints,
    kept: Kept,
    plan: SamplePlan,
    identity: dict[str, Any],
    team: Team,
    history: History,
) -> bool:
    """Go on from the newest checkpoint, if there is one. Collective: every rank calls it.

    Args:
        checkpoints: where to look.
        kept: what is put back.
        plan: which samples are computed where.
        identity: the run's.
        team, history: the workers, and what they have done together.

    Returns:
        Whether there was one.

    Raises:
        ValueError: another run of this program has begun in the directory.
        CheckpointError: the run was another one, or its state does not fit this model.
    """
    found: Found | None = None

    def speak() -> bytes:
        nonlocal found
        try:
            found = checkpoints.find(plan, identity)
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
        told = {name: facts[name] for name in ("position", "last")}
        return json.dumps({**where, "path": found.path, **told}).encode()

    heard = history.together("taking up", lambda: team.hear_lead(speak, "taking up"))
    answer = json.loads(heard)
    if "error" in answer:
        raise CheckpointError(answer["error"])
    if "mistake" in answer:
        raise ValueError(answer["mistake"])
    checkpoints.go_to(answer["directory"])
    checkpoints.begin(None)
    if "path" not in answer:
        return False
    kept.position.move_to(**answer["position"])
    kept.last = answer["last"]
    checkpoints.begin(kept.position.step)
    try:
        snapshot = found.snapshot if found is not None else checkpoints.read(answer["path"])
    except CheckpointError:
        # A replacement that comes late takes the state from the others.
        if not team.is_replacement:
            raise
    else:
        kept.put_back(snapshot)
    return True
