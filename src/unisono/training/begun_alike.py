"""Do all workers begin a loop, or a pass without training, with the same weights?

A loop begins with the leader's weights, and a pass computes with each worker's own. So the result
would depend on the number of workers, and on which of them leads, if a program changes weights by
values that differ between workers, such as those that passes have stored on each.
"""

from __future__ import annotations

import json
import zlib
from typing import Any

from unisono.engine.state.contents import named_parameters
from unisono.engine.state.optimizer_state import StateInPieces, named_states
from unisono.engine.state.optimizers import is_elementwise, optimizers_of
from unisono.errors import MismatchError
from unisono.programs.hashes import hashed
from unisono.training.run_context import RunContext

_SAMPLED = 4096  # bytes of a tensor
_FROM_LEADER = (
    "`{}` differs between workers, and all begin with that of rank {}: compute it in the same way "
    "on every worker, as another worker's counts if that one is lost before the first step"
)


def check_begun_alike(run: RunContext, *, takes_leaders: bool = False) -> None:
    """Raise MismatchError if weights or optimizer state differ between workers. Collective.

    If all take the leader's, a line says so instead, unless weights were drawn without a seed.
    """
    team, model, optimizer = run.team, run.kept.model, run.kept.optimizer
    if team.size == 1:
        return
    named = named_parameters(model, optimizer)
    seen: dict[str, Any] = {**named, **dict(model.named_buffers())}
    states = [one.state for one in optimizers_of(optimizer).values()]
    # Otherwise not every worker has all of it.
    if is_elementwise(optimizer) and not any(isinstance(one, StateInPieces) for one in states):
        of_each = named_states(optimizer, named).items()
        seen |= {f"optimizer.state[{name}]": dict(state) for name, state in of_each}
    votes = None
    while votes is None:
        votes = team.vote(zlib.crc32(hashed(seen, _SAMPLED).encode()), "weights to begin with")
    if len(set(votes.values())) == 1:
        return
    mine = json.dumps({name: hashed(one, _SAMPLED) for name, one in seen.items()}).encode()
    said = [json.loads(one) for one in team.gather(mine, "weights that differ").values()]
    name = next((n for n in seen if len({one.get(n) for one in said}) > 1), "model")
    if not takes_leaders:
        raise MismatchError(
            f"`{name}` must be the same on every worker, but differs between them: change weights "
            f"and optimizer state in the same way on every worker, not under `if rank == 0`, and "
            f"not by what passes store, as each worker computes other samples (take results of "
            f"`predict` and `evaluate` instead)."
        )
    if not run.is_unseeded:
        run.say_once(_FROM_LEADER.format(name, team.membership.leader))
