"""Before the first step of a loop: where does the run resume, and do all workers agree?"""

from __future__ import annotations

import ast
import functools
import inspect
import os
import shlex
import sys
from contextlib import suppress
from dataclasses import fields
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from unisono.data.data_reading import length_of
from unisono.data.fingerprint import REMEDY
from unisono.engine.exchange.choice import EXCHANGE_VARIABLE, check_devices
from unisono.engine.state.contents import digest_of, signature
from unisono.engine.state.run_state import Position
from unisono.engine.state.saved import describe_modes
from unisono.plan.samples import SamplePlan
from unisono.plan.shards import assign, default_shards
from unisono.programs.live import orders_by_hash
from unisono.programs.unlike import Places, values_unlike
from unisono.runtime.device import notices
from unisono.runtime.world import (
    OPEN_MPI,
    SLURM,
    THREADS_VARIABLE,
    read_in_program,
    threads_per_worker,
)
from unisono.training.begun_alike import check_begun_alike
from unisono.training.identity import compare_devices, switches_of
from unisono.training.loop_plan import LoopPlan, Totals
from unisono.training.resume import resume
from unisono.training.run_context import RunContext, samples_now, samples_seen
from unisono.training.sampler_order import facts_of_order

_MANY = 4  # cores from which using one is reported
_IN_EVAL = (
    "every layer of the model is in `eval()` mode and stays so: dropout is off, and BatchNorm uses "
    "its averages; to train as usual, call `model.train()` before"
)


def start(run: RunContext, plan: LoopPlan, places: Places | None) -> None:
    """Move a run to where the loop begins, and check that all workers agree. Collective.

    `places` returns those of the program whose values may differ between workers, which are
    compared in loops that are looked at; None: they are not compared.
    """
    run.num_loops += 1
    run.has_ended, totals = False, plan.totals
    run.loop = f"loop {run.num_loops}, epochs={totals.epochs}, steps={totals.steps}"
    resume(run, plan)
    plan.samples = plan.samples.at(run.kept.position.epoch)
    _fix_shards(run, plan.samples)
    # Between two loops it was called for the first of them, and this one was stopped, too.
    if run.goes_on and not (run.has_ended and run.num_loops > 1):
        run.kept.last.pop("stopped_at", None)
    _check_trainable(run)
    position = run.kept.position
    if position.batch and plan.samples != run.plan and not run.is_ahead:
        raise _changed_within_epoch(run.plan, plan.samples, position)
    if not run.is_ahead:
        run.plan = plan.samples
        if run.checkpoints is not None:
            samples_seen(run, plan)
    _report_unseeded(run)
    _report_hashes(run)
    if not run.is_ahead and (at := _where_number_is_read()):
        run.say_once(
            f"the program reads the number of workers ({Path(at).name}): what it computes from "
            f"that, such as a learning rate, differs with the number of workers"
        )
    if not (run.is_ahead or run.is_over(plan.totals)):
        _report_cores(run, plan.samples.shards)
        _report_loss_costs(run)
        if not any(module.training for module in run.kept.model.modules()):
            run.say_once(_IN_EVAL)
    if not (run.options.exact or run.device.is_host):
        run.say_once(
            "`exact=False`: operations without a deterministic kernel are allowed on "
            f"{run.device.name}, so results may differ from one run to the next"
        )
    payload = run.replicated_calls.together("start of a loop", lambda: _agree(run, plan, places))
    run.are_mixed = bool(payload)


def _changed_within_epoch(
    then: SamplePlan | None, now: SamplePlan, position: Position
) -> ValueError:
    names = [each.name for each in fields(now) if each.compare]
    pairs = {name: (getattr(then, name, None), getattr(now, name)) for name in names}
    changes = [f"`{name}` was {a!r} and is {b!r}" for name, (a, b) in pairs.items() if a != b]
    return ValueError(
        f"dataset length, `batch_size`, `shards`, `shuffle` and `sampler` must stay within an "
        f"epoch, but {', '.join(changes)}, after {position.batch} steps of epoch {position.epoch}: "
        f"finish the epoch first, with `epochs={position.epoch + 1}` instead of `steps`; a "
        f"`sampler` of k indices, such as `RandomSampler(data, num_samples=k)`, makes it shorter."
    )


def _check_trainable(run: RunContext) -> None:
    """Raise ValueError if a loop can change nothing."""
    if not any(parameter.requires_grad for parameter in run.kept.model.parameters()):
        raise ValueError(
            "the model must have parameters to train, but all have `requires_grad=False`: call "
            "`requires_grad_(True)` on the layers that are to be trained."
        )


def _fix_shards(run: RunContext, samples: SamplePlan) -> None:
    """Fix S for the whole run: a program that leaves it out keeps that of its first loop."""
    if run.shards is None:
        is_default = samples.shards == default_shards(samples.batch_size)
        because = f", the default for `batch_size={samples.batch_size}`" if is_default else ""
        assign(samples.shards, run.team.world.world_size, because=because)
        run.shards = samples.shards


def report_over(run: RunContext, totals: Totals) -> None:
    """Report why a loop yields nothing, unless that is reported elsewhere."""
    position = run.kept.position
    if run.team.position or run.is_ahead:
        return
    if run.is_stopped:
        run.say_once(
            f"the run was stopped at step {position.step} and stays there: call the run's "
            f"`go_on()` first, or leave out the callback that stopped it"
        )
        return
    was_left = totals.were_left(run.kept.last, run.num_loops)
    if run.replicated_calls.is_behind or not position.step or was_left:
        return
    counted = ("epochs", totals.epochs, position.epoch), ("steps", totals.steps, position.step)
    given = [(name, total, done) for name, total, done in counted if total is not None]
    asked = " and ".join(f"`{name}={total}`" for name, total, _ in given)
    again = " and ".join(f"`{name}={done + total}`" for name, total, done in given)
    anew = "" if run.checkpoints is None else '; to start over, pass `Checkpoint(resume="never")`'
    run.say_once(
        f"the run is already finished, at epoch {position.epoch} and step {position.step}, "
        f"digest {digest_of(run.kept.model, run.kept.optimizer)[:16]}, with "
        f"{asked}: to train as much again, pass {again}, as totals count from the beginning of a "
        f"run{anew}"
    )


def _report_unseeded(run: RunContext) -> None:
    """Report once, at a start, that weights differ from start to start."""
    if not run.is_unseeded or run.kept.position.step or run.is_ahead or "unseeded" in notices():
        return
    if run.team.position == 0 and not run.replicated_calls.is_behind:
        notices().add("unseeded")
        run.say(
            f"random numbers were drawn without a seed before this run was made, so weights "
            f"drawn from them, and the result, differ from one start to the next; `seed` covers "
            f"training alone: write `torch.manual_seed({run.options.seed})` before the "
            f"model is created"
        )


def _report_hashes(run: RunContext) -> None:
    """Report once that hashes of strings differ between starts, if the program uses any."""
    is_fixed = os.environ.get("PYTHONHASHSEED", "random") != "random"
    if is_fixed or run.is_ahead or run.team.position or "hashes" in notices():
        return
    notices().add("hashes")
    with suppress(OSError, SyntaxError, TypeError, ValueError):
        source = inspect.getsource(sys.modules["__main__"])
        if orders_by_hash(compile(source, "the program", "exec", dont_inherit=True)):
            run.say(
                "this program uses sets or `hash`, and the order of a set of texts differs from "
                "one start to the next: if a result depends on it, set PYTHONHASHSEED=0"
            )


def _where_number_is_read() -> str:
    """Return where the program reads, or names, the number of workers; "" if it does not."""
    return read_in_program.get("at") or _where_number_is_named(sys.modules["__main__"])


@functools.cache
def _where_number_is_named(main: ModuleType) -> str:
    with suppress(OSError, SyntaxError, TypeError):
        for node in ast.walk(ast.parse(inspect.getsource(main))):
            named = getattr(node, "attr", getattr(node, "id", getattr(node, "value", None)))
            if named in ("WORLD_SIZE", "get_world_size"):
                return f"{_file_of_program()}:{getattr(node, 'lineno', '')}"
    return ""


def _report_cores(run: RunContext, num_shards: int) -> None:
    """Report once that a program without a launcher uses one core of many."""
    num_cores = len(os.sched_getaffinity(0))
    num_workers = min(num_cores, num_shards)
    file = shlex.quote(_file_of_program() or "train.py")
    is_chosen = THREADS_VARIABLE in os.environ or not run.device.is_host
    if not run.team.supervisor.is_alone or is_chosen or num_cores < _MANY or num_workers < 2:
        return
    if "cores" not in notices():
        notices().add("cores")
        run.say(
            f"this run computes with one thread, like each worker, on a machine with {num_cores} "
            f"cores: `unisono run -n {num_workers} {file}`, or "
            f"`unisono.launch(function, workers={num_workers})`, uses {num_workers} of them and "
            f"gives the same result"
        )


def _report_loss_costs(run: RunContext) -> None:
    """Report once what is lost with a worker that is not replaced, and what would replace it."""
    here, hosts, file = run.team.world, len(run.team.hosts), _file_of_program()
    is_launched = run.team.supervisor.hears_signals and here.world_size > 1 and file
    if run.checkpoints is None or not is_launched or torch.distributed.is_initialized():
        return
    way = "unisono run" if hosts == 1 else f"unisono run --nnodes {hosts} …"
    ways = {SLURM: "srun --ntasks-per-node=1 unisono run", OPEN_MPI: "mpirun -N 1 unisono run"}
    way = f"{ways.get(here.started_by, way)} -n {here.local_world_size}"
    since = "the newest checkpoint" if run.checkpoints.every is not None else "the run began"
    run.say_once(
        f"a lost worker ends all workers, and what was computed since {since} is computed again; "
        f"`{way} {shlex.quote(file)}` would replace the worker, with the same result"
    )


def _file_of_program() -> str:
    return Path(getattr(sys.modules["__main__"], "__file__", None) or "").name


def _agree(run: RunContext, plan: LoopPlan, places: Places | None) -> bytes:
    samples, totals, kept = plan.samples, plan.totals, run.kept
    known = _known(run, plan)
    run.team.agree(
        {
            "the step that the run has come to": kept.position.step,
            "`batch_size`": samples.batch_size,
            "`shards`": samples.shards,
            "`seed`": samples.seed,
            **{f"`{name}`": value for name, value in run.fixed.items()},
            "`shuffle`": samples.shuffle,
            "`sampler`": samples.sampler,
            **facts_of_order(samples, kept.position.epoch),
            "`epochs`": totals.epochs,
            "`steps`": totals.steps,
            "the model with its optimizer": signature(kept.model, kept.optimizer),
            **describe_modes(kept.model, kept.optimizer),
            "the number of threads": threads_per_worker(),
            "torch's version": torch.__version__,
            "the type of device": run.device.torch.type,
            "torch's arithmetic": ", ".join(switches_of(run.device).values()),
            EXCHANGE_VARIABLE: run.exchange,
        },
        known={**known, "samples of an epoch": samples.num_samples},
        remedy=REMEDY,
    )
    if not run.is_ahead:
        check_begun_alike(run, takes_leaders=run.num_loops == 1)
    run.unlike = ()
    if places is not None and run.is_looked_at:
        run.unlike = values_unlike(run.team, places, run.say_once)
    check_devices(run.exchange, run.device, run.team)
    if run.are_mixed is None:
        told = compare_devices(run.device, run.team, exact=run.options.exact)
        run.are_mixed = bool(told)
        if told and run.team.position == 0:
            run.say(told)
    return b"mixed" if run.are_mixed else b""


def _known(run: RunContext, plan: LoopPlan) -> dict[str, Any]:
    """Return a fingerprint of the dataset, if there are other workers to compare it with."""
    length = length_of(plan.reading.dataset)
    if run.team.size == 1 or run.is_ahead:
        return {"dataset length": length}
    # In a resumed run, callbacks' changes to the dataset have been restored.
    seen = samples_now(plan) if run.kept.position.step else samples_seen(run, plan)
    return {"dataset length": length, **seen}
