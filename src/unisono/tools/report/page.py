"""The report of one run: one HTML page that contains all it needs and makes no request.

The page's content security policy lets a browser run its two scripts, identified by their hashes,
and load nothing: a script in the text would not run, and no request would leave. All values in a
template are escaped, and hidden characters are written out.
"""

from __future__ import annotations

import base64
import hashlib
import json
import shlex
import time
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import resources
from itertools import islice
from pathlib import Path
from typing import Any

from unisono.runtime.notices import amount, count, duration, plural
from unisono.tools.report import curves
from unisono.tools.report.curves import small
from unisono.tools.report.history import History, identity, word_of_best
from unisono.tools.report.run_progress import RunProgress
from unisono.tools.report.text import moment, name, plain, program_of, value
from unisono.training.events.events import End, Failure, Interrupted, Start

_BEST_AT_MOST = 4  # validated metrics with a tile


@dataclass(frozen=True)
class State:
    """The state of a run."""

    word: str
    css: str  # the class of its colour
    last_words: str  # why it has ended, or that this is unknown


def report(history: History) -> str:
    """Return the page about a run."""
    progress, start = history.progress, history.progress.first
    has_times = bool(history.phases.by_rank)
    return rendered(
        "run.html",
        history=history,
        script_name=name(program_of(start.command)[0]) if start and start.command else "a run",
        state=state(progress),
        tiles=list(_tiles(history)),
        learning=curves.learning(history),
        speed=curves.others(history),
        why=why_not_faster(history) if has_times else [],
        phases=[curves.by_phase(history), curves.by_worker(history)] if has_times else [],
        counts=list(_counts(history)),
        fixed=identity(history),
        where=_where(start) if start else {},
        command=_commands(start, history.folder) if start else "",
        digest=progress.ended.digest if isinstance(progress.ended, End) else None,
    )


def state(progress: RunProgress) -> State:
    """Return the state of a run."""
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
        "Its file records no end: when this page was written, the run was running or had been cut "
        f"off. Its last event was at {moment(progress.last_unix_s)}.",
    )


def _tiles(history: History) -> Iterator[tuple[str, str, str]]:
    """Yield the results of a run: a name, a number, and a comment."""
    progress, start = history.progress, history.progress.latest
    goal = f"of {count(start.end_step)}" if start and start.end_step else ""
    if progress.epoch is not None:
        goal += f" · epoch {count(progress.epoch + 1)}"
    yield "Steps", count(progress.num_done), goal.strip(" ·")
    if (speed := history.mean_samples_per_second) is not None:
        yield "Samples a second", count(speed), "in the mean"
    loss = history.means.get("loss")
    if loss is not None and loss.last is not None:
        yield "Loss", amount(loss.last), f"training, step {count(loss.last_step or 0)}"
    for metric, (step, found) in islice(history.best.items(), _BEST_AT_MOST):
        yield (
            f"{word_of_best(metric)} validation {metric}",
            amount(found),
            f"after {plural(step, 'step')}",
        )
    shards = progress.first.shards if progress.first else None
    workers = count(len(progress.ranks)) if progress.ranks else "–"
    yield "Workers", workers, plural(shards, "shard") if shards else ""
    fits = f"in {progress.num_starts} fits" if progress.num_starts > 1 else ""
    yield "Time in fit", duration(progress.seconds or None), fits
    yield "Workers lost", count(progress.num_lost), ""


def why_not_faster(history: History) -> list[str]:
    """Return what costs time, in sentences."""
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
        yield "No trouble is recorded." if progress.ended else "No trouble is recorded so far."
    if progress.checkpoint is None:
        yield "No checkpoint was begun."
    else:
        begun = plural(progress.num_checkpoints, "checkpoint")
        last = count(progress.checkpoint.step)
        yield f"{begun} begun, the last after step {last}: `unisono checkpoints` lists whole ones."
    if history.num_unreadable:
        yield f"{plural(history.num_unreadable, 'line')} of the event file could not be read."


def _where(start: Start) -> dict[str, object]:
    found: dict[str, object] = {"began": moment(start.time_unix_s)}
    found |= {f"{key} version": one for key, one in start.versions.items()}
    found |= {key.replace("_", " "): one for key, one in start.machine.items()}
    facts = {
        "host": start.host,
        "parameters": None if start.num_parameters is None else count(start.num_parameters),
        "workers at the beginning": start.world_size,
        "loader processes a worker": start.loader_workers,
    }
    return found | {key: one for key, one in facts.items() if one is not None}


def _commands(start: Start, folder: Path | None) -> str:
    """Return commands for a shell, which run it again from the beginning instead of resuming it."""
    change = f"cd {shlex.quote(start.folder)}\n" if start.folder else ""
    if folder is not None:
        before = folder.with_name(f"{folder.name}-before")
        change += f"mv {shlex.quote(str(folder))} {shlex.quote(str(before))}\n"
    return change + command_line(start)


def command_line(start: Start) -> str:
    """Return a shell command that runs the program again, with as many threads per worker."""
    threads = start.identity.get("threads", 1)
    before = f"UNISONO_THREADS={threads} " if type(threads) is int and threads > 1 else ""
    return before + shlex.join(start.command)


def rendered(template: str, **context: Any) -> str:
    """Return the page of a template beside this file."""
    try:
        from jinja2 import Environment, FunctionLoader, StrictUndefined
        from markupsafe import Markup
        from plotly.offline import get_plotlyjs
    except ImportError:
        raise ValueError(
            "To draw a page, plotly and jinja2 must be installed, but are not: install them with "
            "`pip install 'unisono[report]'`."
        ) from None
    environment = Environment(
        loader=FunctionLoader(_resource),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=lambda shown: shown if isinstance(shown, Markup) else plain(shown),
        trim_blocks=True,
    )
    environment.filters |= {"count": count, "duration": duration, "moment": moment, "value": value}
    environment.policies["json.dumps_function"] = _as_json
    library, script = get_plotlyjs(), _resource("page.js")
    return environment.get_template(template).render(
        policy=Markup(_policy(library, script)),
        style=Markup(_resource("page.css")),
        library=Markup(library),
        script=Markup(script),
        made_unix_s=time.time(),
        **context,
    )


def _policy(*scripts: str) -> str:
    digests = (base64.b64encode(hashlib.sha256(one.encode()).digest()) for one in scripts)
    hashes = " ".join(f"'sha256-{digest.decode()}'" for digest in digests)
    return (
        f"default-src 'none'; script-src {hashes}; style-src 'unsafe-inline'; "
        "img-src data: blob:; base-uri 'none'; form-action 'none'"
    )


def _as_json(found: object, **_: object) -> str:
    return json.dumps(small(found), allow_nan=False, separators=(",", ":"))


def _resource(name: str) -> str:
    return resources.files("unisono.tools.report").joinpath(name).read_text(encoding="utf-8")
