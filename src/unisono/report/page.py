"""The report of one run: what came out, how it went, and how to get it again."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from dataclasses import dataclass

from unisono.quantities import amount, count, duration, plural
from unisono.report import curves
from unisono.report.document import rendered
from unisono.report.events import End, Failure, Interrupted, Start
from unisono.report.history import History, identity
from unisono.report.run_progress import RunProgress
from unisono.report.text import moment, name, program_of


@dataclass(frozen=True)
class State:
    """How a run stands."""

    word: str
    css: str  # the class of its colour
    last_words: str  # why it has ended, or that nothing says so


@dataclass(frozen=True)
class Tile:
    """A number that came out of a run."""

    label: str
    shown: str
    below: str
    is_long: bool = False


def report(history: History) -> str:
    """Return the page that tells of a run."""
    progress, start = history.progress, history.progress.first
    has_times = bool(history.phases.by_rank)
    return rendered(
        "run.html",
        history=history,
        script_name=script_name(history),
        state=state(progress),
        tiles=list(_tiles(history)),
        learning=curves.learning(history),
        speed=curves.others(history),
        why=why_not_faster(history) if has_times else [],
        phases=[curves.by_phase(history), curves.by_worker(history)] if has_times else [],
        phase_keys=curves.PHASE_KEYS,
        counts=list(_counts(history)),
        fixed=identity(history),
        where=_where(start) if start else {},
        command=_commands(start) if start else "",
        digest=progress.ended.digest if isinstance(progress.ended, End) else None,
        left_out=list(_left_out(history)),
    )


def script_name(history: History) -> str:
    """Return what was run, in a few words."""
    start = history.progress.first
    return name(program_of(start.command)[0]) if start and start.command else "a run"


def state(progress: RunProgress) -> State:
    """Return how a run stands."""
    match progress.ended:
        case Interrupted() as ended:
            return State("interrupted", "warn", f"Interrupted {ended.in_words}.")
        case Failure() as ended:
            whose = "" if ended.rank is None else f"Worker {ended.rank}: "
            return State("failed", "bad", whose + ended.in_words)
        case End(stopped_early=stopped_early):
            return State("stopped early" if stopped_early else "finished", "good", "")
    return State(
        "no end yet",
        "warn",
        "Its file tells of no end: when this page was made it was under way, or was cut off. The "
        f"last that was heard of it was at {moment(progress.last_unix_s)}.",
    )


def _tiles(history: History) -> Iterator[Tile]:
    progress, start = history.progress, history.progress.latest
    goal = f"of {count(start.end_step)}" if start and start.end_step else ""
    if progress.epoch is not None:
        goal += f" · epoch {count(progress.epoch + 1)}"
    yield Tile("Steps", count(progress.num_done), goal.strip(" ·"))
    if (speed := history.mean_samples_per_second) is not None:
        yield Tile("Samples a second", count(speed), "in the mean")
    yield from _learning_tiles(history)
    shards = progress.first.shards if progress.first else None
    workers = count(len(progress.ranks)) if progress.ranks else "–"
    yield Tile("Workers", workers, plural(shards, "shard") if shards else "")
    fits = f"in {progress.num_starts} fits" if progress.num_starts > 1 else ""
    yield Tile("Time in fit", duration(progress.seconds or None), fits)
    yield Tile("Workers lost", count(progress.num_lost), "")
    if isinstance(progress.ended, End) and progress.ended.digest:
        yield Tile("Digest", progress.ended.digest[:12], "equal in equal runs", is_long=True)


def _learning_tiles(history: History) -> Iterator[Tile]:
    loss = history.means.get("loss")
    if loss is not None and loss.last is not None:
        yield Tile("Loss", amount(loss.last), f"training, step {count(loss.last_step or 0)}")
    for metric in ("loss", "accuracy"):
        if metric in history.best:
            step, found = history.best[metric]
            yield Tile(f"Best validation {metric}", amount(found), f"after {plural(step, 'step')}")


def why_not_faster(history: History) -> list[str]:
    """Say in sentences what costs time."""
    if history.findings:
        return [f"{one.line[0].upper()}{one.line[1:]}." for one in history.findings]
    if len(history.phases.by_rank) < 2:
        return ["Nothing stands out: the time goes into computing."]
    if history.findings is None:
        return ["The steps were too few to tell whether a worker is slow."]
    return ["Nothing stands out: no worker is slow, and the machine was not too busy."]


def _counts(history: History) -> Iterator[str]:
    progress = history.progress
    if not history.marks:
        yield "Nothing went wrong." if progress.ended else "Nothing went wrong so far."
    if progress.checkpoint is None:
        yield "No checkpoint was written."
    else:
        kept = plural(progress.num_checkpoints, "checkpoint")
        yield f"{kept}, the last after step {count(progress.checkpoint.step)}."


def _where(start: Start) -> dict[str, object]:
    found: dict[str, object] = {"began": moment(start.time_unix_s)}
    found |= {f"{key} version": one for key, one in start.versions.items()}
    found |= {key.replace("_", " "): one for key, one in start.machine.items()}
    facts = {
        "host": start.host,
        "parameters": None if start.num_parameters is None else count(start.num_parameters),
        "workers at the begin": start.world_size,
        "loader processes a worker": start.loader_workers,
    }
    return found | {key: one for key, one in facts.items() if one is not None}


def _commands(start: Start) -> str:
    change = f"cd {shlex.quote(start.folder)}\n" if start.folder else ""
    return change + command_line(start)


def command_line(start: Start) -> str:
    """Return a command that runs it again, as a shell reads it, with as many threads a worker."""
    threads = start.identity.get("threads", 1)
    before = f"UNISONO_THREADS={threads} " if type(threads) is int and threads > 1 else ""
    return before + shlex.join(start.command)


def _left_out(history: History) -> Iterator[str]:
    if history.num_unreadable:
        yield f"{plural(history.num_unreadable, 'line')} could not be read."
    if history.progress.num_again:
        steps = plural(history.progress.num_again, "step")
        yield f"{steps} came out of order and are left out."
    if history.metrics_left_out:
        left = ", ".join(name(one) for one in sorted(history.metrics_left_out))
        yield f"These metrics are not drawn, as there are too many: {left}."
