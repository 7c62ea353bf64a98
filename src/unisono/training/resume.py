"""Where does a run resume when it is started again? The leader decides, and all others follow.

`directory` may be one folder that all hosts share, or one on each: Unisono finds out which.

::

    shared   the leader writes checkpoints, and all workers read them
    apart    the first worker of each host writes all of them there, and its host reads them

Apart, hosts may have different checkpoints: one was lost before it wrote its copy, or is a new
machine. The run continues from the newest checkpoint that all have with the same contents.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from unisono.engine.exchange.choice import chosen
from unisono.engine.exchange.shared_copy import SharedCopy
from unisono.engine.state.optimizers import is_elementwise
from unisono.engine.state.packing import unpacked_state
from unisono.engine.state.saved import CheckpointData, bytes_at_most, check_fits
from unisono.errors import CheckpointError
from unisono.programs.hashes import hashed
from unisono.programs.kept import KEY
from unisono.runtime.checkpoint.run_directory import name_of
from unisono.runtime.launch.cell import in_notebook
from unisono.runtime.workers.team import Team
from unisono.training.checkpoints import Checkpoints, FoundCheckpoint
from unisono.training.course import COURSE, other_course
from unisono.training.failures import share_outcome
from unisono.training.first_loss import (
    FIRST_LOSS,
    first_loss_computed,
    first_weights,
    other_program,
)
from unisono.training.identity import LENGTH, SAMPLES, identity, known_length, other_data
from unisono.training.loop_plan import LoopPlan
from unisono.training.options import OF_PROGRAM
from unisono.training.run_context import RunContext, samples_seen


def resume(run: RunContext, plan: LoopPlan) -> None:
    """Resume from the newest checkpoint, at the first loop that had not ended by then.

    If a later loop wrote it, restore what this loop ended with, for what the program does before
    the next one; if that is not kept, the newest state, as far as it fits. Collective: every rank
    calls it.
    """
    checkpoints, kept = run.checkpoints, run.kept
    if checkpoints is None:
        return
    if run.has_resumed:
        checkpoints.open()
        checkpoints.mark_passed()
        return
    kept.recorded.record()
    begins_as = _told(run)
    settle_directory(run)
    found: FoundCheckpoint | None = None

    def find() -> dict[str, Any]:
        nonlocal found
        answer, found = _find(run, checkpoints, plan)
        return answer

    (answer,) = share_outcome(
        lambda speak: [run.replicated_calls.broadcast_from_leader(speak, "taking up")],
        find,
        run.team.world.rank,
    )
    checkpoints.use_directory(answer["directory"])
    run.first_loss = answer[FIRST_LOSS]
    checkpoints.misses_end |= answer.get("is_later", False)
    checkpoints.begin(None)
    is_ahead: bool = answer.get("is_ahead", False)
    if "path" in answer:
        plan.samples = replace(plan.samples, shards=answer["shards"])
        kept.position.move_to(**answer["position"])
        kept.last = answer["last"]
        checkpoints.begin(kept.position.step)
        snapshot = None if found is None else found.snapshot
        # Before the state is restored, which undoes what callbacks had changed in the dataset.
        here = None if is_ahead else _data_here(run, plan)
        if checkpoints.misses_end and (left := answer["left"] or (not is_ahead and answer)):
            _report_course(run, left["last"].get(COURSE))
        _put_back(run, checkpoints, answer, snapshot, is_ahead=is_ahead)
        run.has_ended = answer["has_ended"]
        if answer["was_passed"]:
            plan.totals.note_left(kept.last, run.num_loops)
        # The leader releases the files once all have read them.
        run.replicated_calls.together(
            _PURPOSE, lambda: b"".join(run.team.gather(b"", _PURPOSE).values())
        )
        if not is_ahead:
            run.plan = plan.samples
            if checkpoints.misses_end:
                _check_loop(run)
            if here is not None or run.program_kept is None:
                _check_data(run, answer["data"], here or _data_here(run, plan))
    run.is_ahead, run.has_resumed = is_ahead, not is_ahead
    checkpoints.note_beginning(begins_as)
    takes_program = run.options.saving.options == OF_PROGRAM
    is_done = "path" in answer and not is_ahead and run.is_over(plan.totals)
    is_news = checkpoints.is_another and _told(run) != begins_as
    if is_news and is_done and not takes_program:
        _refuse_anothers_weights(checkpoints.directory)


def _data_here(run: RunContext, plan: LoopPlan) -> dict[str, Any]:
    return {SAMPLES: samples_seen(run, plan), LENGTH: known_length(plan.samples)}


def _check_data(run: RunContext, there: Mapping[str, Any], here: Mapping[str, Any]) -> None:
    """Raise if the data differ from the checkpoint's, unless the program's are to be used."""
    try:
        line = other_data(there, here, takes_program=run.options.saving.options == OF_PROGRAM)
    except CheckpointError as error:
        if run.checkpoints is not None and run.checkpoints.misses_end:
            raise CheckpointError(_FROM_LATER_WEIGHTS) from error
        raise
    if line:
        run.say_once(line)


def _told(run: RunContext) -> str:
    """Hash what a run begins with: options, and the first weights of each parameter."""
    few, groups = first_weights(run.kept.model), run.kept.optimizer.param_groups
    return hashed([few, [{**group, "params": len(group["params"])} for group in groups]])


def _refuse_anothers_weights(directory: Path) -> None:
    """Raise CheckpointError, so that another trainer's result is not taken for this one's.

    In notebooks and at a prompt, the user sees that there was nothing to do.
    """
    if in_notebook() or hasattr(sys, "ps1"):
        return
    raise CheckpointError(
        f"`directory` must belong to one trainer, but an earlier one of this program, which began "
        f"with other weights or options, has trained in {directory} at least as far as this one "
        f"would, so this one would train nothing and return the other's weights: pass a directory "
        f'for each, such as `directory=f"runs/{{fold}}"`; if you want these weights, use that '
        f"trainer, or create the model and the optimizer as it did, with the same seed."
    )


def _find(
    run: RunContext, checkpoints: Checkpoints, plan: LoopPlan
) -> tuple[dict[str, Any], FoundCheckpoint | None]:
    """Find the checkpoint, as the leader; return it, after what the others need to know."""
    kept = run.kept
    here = identity(plan.samples, run.fixed, run.device, is_kept=True)
    here[SAMPLES] = samples_seen(run, plan)
    if run.shards is None:
        del here["shards"]  # those of the checkpoint are used
    try:
        checkpoints.begin_in_directory()  # without forks, which inherit locks
        with first_loss_computed(run, plan) as first_loss:
            found = checkpoints.find(
                plan.samples,
                plan.totals,
                here,
                bytes_at_most(kept.model),
                run.loop,
                run.num_loops,
                functools.partial(check_fits, model=kept.model, optimizer=kept.optimizer),
            )
            run.first_loss = run.first_loss or first_loss()
    except OSError as error:
        raise CheckpointError(
            f"`directory` must be a folder that can be read and written, or created, but "
            f"“{error}”: pass another one, or check its permissions."
        ) from None
    answer: dict[str, Any] = {
        "directory": str(checkpoints.directory),
        FIRST_LOSS: run.first_loss,
    }
    if found is None:
        return answer, None
    facts = found.snapshot.facts
    if not found.is_ahead and (
        line := other_program(facts["identity"], here | {FIRST_LOSS: run.first_loss})
    ):
        run.say(line)
    if not run.is_ahead:  # otherwise all was reported
        for line in kept.recorded.describe_changes(facts["given"]):
            run.say(line)
    answer |= {name: facts[name] for name in ("position", "last")}
    held = {name: file.place for name, file in found.snapshot.files.items()}
    answer |= {"path": found.path, "is_ahead": found.is_ahead, "held": held}
    told = ("is_later", "has_ended", "was_passed", "left")
    answer |= {name: getattr(found, name) for name in told}
    answer["data"] = {name: facts["identity"].get(name) for name in (SAMPLES, LENGTH)}
    shards = facts["identity"].get("shards")
    return answer | {"shards": shards if type(shards) is int else plan.samples.shards}, found


def _put_back(
    run: RunContext,
    checkpoints: Checkpoints,
    answer: Mapping[str, Any],
    snapshot: CheckpointData | None,
    *,
    is_ahead: bool,
) -> None:
    """Load the state of a checkpoint that the leader has already read."""
    try:
        if snapshot is None:
            snapshot = checkpoints.read(answer["path"], answer["held"])
    except CheckpointError:
        # A replacement that is late takes the state from the others.
        if not run.team.is_replacement:
            raise
        return
    optimizer = run.kept.optimizer
    # These copy the state into their own memory when the loop begins, which is next.
    lends = is_elementwise(optimizer) and chosen(run.exchange, optimizer).ownership is SharedCopy
    # Until that later loop the program may still extend its optimizer, for example.
    with contextlib.suppress(*[CheckpointError] * is_ahead):
        hidden = run.kept.hidden
        # What a later loop changed, such as a count of loops, would mislead the next calls.
        ours = hidden.pop(KEY, None) if answer["is_later"] else None
        run.kept.apply(snapshot, lends=lends and not is_ahead)
        run.kept.recorded.apply(snapshot.facts["given"])
        if answer["is_later"]:
            hidden.pop(KEY, None)
            hidden |= {} if ours is None else {KEY: ours}
            if (left := answer["left"]) is not None:
                run.kept.position.move_to(**left["position"])
                run.kept.last = left["last"]
                if run.program_kept is not None and left["program"] is not None:
                    program = unpacked_state({KEY: left["program"]}, {})
                    run.program_kept.load_state_dict(program[KEY])


def _report_course(run: RunContext, counts: Any) -> None:
    """Report, once, a count of the program that differs from those in the checkpoint."""
    if COURSE in run.told or not isinstance(counts, Mapping):
        return
    if line := other_course(run, counts):
        run.told.add(COURSE)
        run.say_once(line)


def _check_loop(run: RunContext) -> None:
    """Raise CheckpointError if the checkpoint is of another loop of the program."""
    then = None if run.program_kept is None else run.program_kept.loaded_loop
    if then is not None and then != run.num_loops:
        raise CheckpointError(
            f"a program that resumes must take the same course again, but its checkpoint is of its "
            f"loop number {then}, and it has come there in number {run.num_loops}, as it saw the "
            f"newest weights after older loops: let the number of loops depend on values that "
            f"these loops leave in variables, not on the weights; or begin again with "
            f'`Checkpoint(keep=1000, resume="never")`, which keeps what a thousand loops end with.'
        )


_FROM_LATER_WEIGHTS = (
    "a run that resumes must have the data of its checkpoint, but the program has computed them "
    "from the newest weights, as only the newest loops keep what they ended with: compute the data "
    "from values that do not depend on the weights, store them in files, or use one loop over all "
    "steps, with a dataset."
)
_PURPOSE = "run directory"


def settle_directory(run: RunContext) -> None:
    """Find out whether hosts share the run directory; if not, agree on a checkpoint that all have.

    If `directory` is a URL, first update the local copy. Collective: every rank calls it before
    the leader looks for a checkpoint.
    """
    checkpoints = run.checkpoints
    if checkpoints is None or not (checkpoints.url or len(run.team.hosts) > 1):
        return
    if len(run.team.hosts) > 1:
        mine = str(checkpoints.directory).encode()
        checkpoints.use_directory(
            run.replicated_calls.broadcast_from_leader(lambda: mine, _PURPOSE).decode()
        )
    said = run.replicated_calls.together(_PURPOSE, lambda: _settle(run))
    checkpoints.is_on_each_host = bool(said)


def newest_common(held: Sequence[Mapping[int, str]]) -> int | None:
    """Return the newest step whose checkpoint all hosts have with the same digest, or None."""
    common = set.intersection(*(set(one.items()) for one in held))
    return max((step for step, _ in common), default=None)


def _settle(run: RunContext) -> bytes:
    """Return something nonempty if each host has a separate directory."""
    team, checkpoints = run.team, run.checkpoints
    assert checkpoints is not None
    is_shared = len(team.hosts) == 1 or _is_shared(team, checkpoints.directory)
    url, at_most = "", bytes_at_most(run.kept.model)
    if checkpoints.url:
        url = _opened(team, checkpoints, at_most)
    if is_shared:
        return b""
    said: dict[str, object] = {}
    if team.leads_host:
        try:
            if url and not team.is_leader:
                checkpoints.open_remote(url, at_most, owns=False)
            said["held"] = checkpoints.complete_here()
        except (CheckpointError, OSError) as error:
            said["error"] = str(error)
    heard = team.gather(json.dumps(said).encode(), _PURPOSE)
    told = [json.loads(heard[ranks[0]]) for ranks in team.hosts]
    for host, one in enumerate(told):
        if "error" in one:
            raise CheckpointError(
                f"`directory` must be a folder on each host that can be read and written, or "
                f"created, but on host {host} “{one['error']}”: pass another one, or make room for "
                f"it there."
            )
    held = [{int(step): digest for step, digest in one["held"].items()} for one in told]
    newest = newest_common(held)
    if newest is None and any(held):
        has = "; ".join(f"host {host} has {sorted(one) or 'none'}" for host, one in enumerate(held))
        source = next(host for host, one in enumerate(held) if one)
        folder = checkpoints.directory / "checkpoints" / name_of(max(held[source]))
        raise CheckpointError(
            f"hosts with a separate `directory` each must have a checkpoint in common to continue "
            f"from, but {has}: copy {folder} from host {source} to the others, or pass "
            f'`Checkpoint(resume="never")` to start over.'
        )
    if team.leads_host:
        checkpoints.set_aside(-1 if newest is None else newest)
    return b"on each host"


def _opened(team: Team, checkpoints: Checkpoints, at_most: Mapping[str, int]) -> str:
    """Open the leader's URL and return it. Collective."""

    def open_it() -> str:
        try:
            checkpoints.open_remote(checkpoints.url, at_most, owns=True)
        except OSError as error:
            raise CheckpointError(f"the copy of `directory` must be a folder: {error}.") from None
        return checkpoints.url

    (url,) = share_outcome(
        lambda speak: [team.broadcast_from_leader(speak, _PURPOSE)], open_it, team.world.rank
    )
    return str(url)


def _is_shared(team: Team, directory: Path) -> bool:
    """Return whether all hosts see what the leader writes there; raise if only some do."""

    def leave_mark() -> bytes:
        with contextlib.suppress(OSError):
            directory.mkdir(parents=True, exist_ok=True)
            fd, path = tempfile.mkstemp(prefix=".seen-by-all-hosts-", dir=directory)
            os.close(fd)
            return os.path.basename(path).encode()
        return b""

    name = team.broadcast_from_leader(leave_mark, _PURPOSE).decode()
    if not name:
        return True  # the leader's search for a checkpoint reports it
    mark = directory / name
    with contextlib.suppress(OSError):  # complete_here reports it
        # NFS may remember for 30 s that there was no such folder, but asks when one is made.
        directory.mkdir(parents=True, exist_ok=True)
    heard = team.gather(b"seen" if mark.exists() else b"", _PURPOSE)
    if team.is_leader:
        mark.unlink(missing_ok=True)
    apart = [rank for rank, seen in heard.items() if not seen]
    if apart and len(apart) + len(team.hosts[0]) < team.size:  # host 0 has the leader
        raise CheckpointError(
            f"`directory` must be one folder that all hosts share, or a separate folder on each, "
            f"but ranks {apart} do not see what rank 0 writes to {directory}, while others do: "
            f"pass one that all share."
        )
    return not apart
