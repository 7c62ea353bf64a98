"""Is `directory` the same folder on all hosts, or one on each? Both do; found out, not asked.

::

    shared   the leader writes checkpoints, and all read them
    apart    the first worker of each host writes them all there, and its host reads them

Apart, hosts need not have the same ones: one may have been lost before it had written its copy, or
be a new machine. The run goes on from the newest checkpoint that all have, with the same contents.
"""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from unisono.errors import CheckpointError
from unisono.train.run_context import RunContext
from unisono.workers.team import Team

# By step, what tells its contents apart.
HostCheckpoints = Mapping[int, str]

_PURPOSE = "run directory"


def settle_directory(run: RunContext) -> None:
    """Find out whether hosts share the run directory; if not, agree on a checkpoint that all have.

    Collective: every rank calls it before the leader looks for a checkpoint.

    Raises:
        CheckpointError: only some hosts share it, one cannot be used, or the hosts have no
            checkpoint in common; on every worker.
    """
    checkpoints = run.checkpoints
    if checkpoints is None or len(run.team.hosts) == 1:
        return
    mine = str(checkpoints.directory).encode()
    checkpoints.go_to(run.joint_calls.hear_leader(lambda: mine, _PURPOSE).decode())
    said = run.joint_calls.together(_PURPOSE, lambda: _settle(run))
    checkpoints.is_on_each_host = bool(said)


def newest_common(held: Sequence[HostCheckpoints]) -> int | None:
    """Find the newest checkpoint that all hosts have with the same contents; None: there is none.

    Args:
        held: what each host has.
    """
    common = set.intersection(*(set(one.items()) for one in held))
    return max((step for step, _ in common), default=None)


def _settle(run: RunContext) -> bytes:
    """Give something if each host has a directory of its own."""
    team, checkpoints = run.team, run.checkpoints
    assert checkpoints is not None
    if _is_shared(team, checkpoints.directory):
        return b""
    said: dict[str, object] = {}
    if team.leads_host:
        try:
            said["held"] = checkpoints.held_here()
        except (CheckpointError, OSError) as error:
            said["error"] = str(error)
    heard = team.gather(json.dumps(said).encode(), _PURPOSE)
    told = [json.loads(heard[ranks[0]]) for ranks in team.hosts]
    for host, one in enumerate(told):
        if "error" in one:
            raise CheckpointError(
                f"`directory` must be a folder on each host that can be read and written, or that "
                f"can be made, but on host {host} “{one['error']}”: pass another one, or make room "
                f"for it there."
            )
    held = [{int(step): digest for step, digest in one["held"].items()} for one in told]
    newest = newest_common(held)
    if newest is None and any(held):
        raise CheckpointError(_nothing_in_common(checkpoints.directory, held))
    if team.leads_host:
        checkpoints.set_aside(-1 if newest is None else newest)
    return b"on each host"


def _nothing_in_common(directory: Path, held: Sequence[HostCheckpoints]) -> str:
    has = "; ".join(
        f"host {host} has {'those of steps ' if one else 'none'}{', '.join(map(str, sorted(one)))}"
        for host, one in enumerate(held)
    )
    source = next(host for host, one in enumerate(held) if one)
    name = f"checkpoints/step-{max(held[source]):012}"
    return (
        f"all hosts must have a checkpoint in common to go on from, where each has a `directory` "
        f"of its own, but {has}: copy {directory / name} from host {source} to the others, or "
        f'pass `resume="never"` to begin anew.'
    )


def _is_shared(team: Team, directory: Path) -> bool:
    """Tell whether all hosts see what the leader writes there.

    Raises:
        CheckpointError: only some do; on every worker.
    """

    def leave_mark() -> bytes:
        with contextlib.suppress(OSError):
            directory.mkdir(parents=True, exist_ok=True)
            fd, path = tempfile.mkstemp(prefix=".seen-by-all-hosts-", dir=directory)
            os.close(fd)
            return os.path.basename(path).encode()
        return b""

    name = team.hear_leader(leave_mark, _PURPOSE).decode()
    if not name:
        return True  # what is wrong there is said where the leader looks for a checkpoint
    mark = directory / name
    heard = team.gather(b"seen" if mark.exists() else b"", _PURPOSE)
    if team.is_leader:
        mark.unlink(missing_ok=True)
    apart = [rank for rank, seen in heard.items() if not seen]
    if apart and len(apart) + len(team.hosts[0]) < team.size:  # host 0 has the leader
        raise CheckpointError(
            f"`directory` must be one folder that all hosts share, or a folder of its own on each, "
            f"but what rank 0 writes to {directory} is not there for ranks {apart}, and is for "
            f"others: pass one that all share."
        )
    return not apart
