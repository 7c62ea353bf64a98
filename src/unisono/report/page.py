"""The report of one run: what came out, how it went, and how to get it again."""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence
from datetime import UTC, datetime

from unisono.report import curves, times
from unisono.report.document import Page, document, legend_html, section, table
from unisono.report.events import End, Failure, Interrupted
from unisono.report.history import MAX_MARKS, History, identity
from unisono.report.marks import Kind, Mark
from unisono.report.run_progress import RunProgress
from unisono.report.text import (
    SCRIPTS,
    count,
    duration,
    in_page,
    moment,
    name,
    plural,
    value,
)
from unisono.report.tiles import tiles
from unisono.report.timeline import timelines

_KIND_CLASSES = {
    Kind.LOST: "bad",
    Kind.FAILED: "bad",
    Kind.NOT_FINITE: "bad",
    Kind.WENT_BACK: "warn",
    Kind.JOINED: "good",
}


def report(history: History) -> str:
    """Return the page that tells of a run."""
    page = Page()
    learning = page.place(curves.learning(history))
    speed = page.place(curves.others(history))
    body = [
        _header(history),
        f'<ul class="tiles">{"".join(tiles(history))}</ul>',
        section("Learning", learning or _nothing("No step has been finished yet.")),
        section("How it was learnt", speed) if speed else "",
        section("Where the time goes", *_time_parts(page, history)),
        section("What happened", *_happened(history)),
        section("What this run is", _identity(history)),
        section("How to get the same result", *_reproduce(history)),
        _footer(history),
    ]
    return document(f"{script_name(history)} – Unisono report", body, page.figures)


def script_name(history: History) -> str:
    """Return what was run, in a few words: the first Python file of the command."""
    start = history.course.first
    command = start.command if start else ()
    for word in command:
        if word.endswith(SCRIPTS):
            return name(os.path.basename(word))
    return name(command[0]) if command else "a run"


def command_line(history: History) -> str:
    """Return a command that runs it again, as a shell reads it, with as many threads a worker."""
    start = history.course.first
    assert start is not None
    threads = start.identity.get("threads", 1)
    before = f"UNISONO_THREADS={threads} " if type(threads) is int and threads > 1 else ""
    return before + shlex.join(start.command)


def state(course: RunProgress) -> tuple[str, str]:
    """Return how the run stands, and the class of its colour."""
    if isinstance(course.ended, Interrupted):
        return "interrupted", "warn"
    if isinstance(course.ended, Failure):
        return "failed", "bad"
    if isinstance(course.ended, End):
        return ("stopped early", "good") if course.ended.stopped_early else ("finished", "good")
    return "no end yet", "warn"


def _header(history: History) -> str:
    course, start = history.course, history.course.first
    word, colour = state(course)
    said = []
    if start is not None:
        said.append(f"Began {moment(start.time_unix_s)}")
        machine = start.machine
        where = [start.host or "", value(machine["processor"]) if "processor" in machine else ""]
        said.append(" · ".join(filter(None, where)))
    title = f'{in_page(script_name(history))}<span class="state {colour}">{word}</span>'
    below = in_page(" · ".join(filter(None, said)))
    return f'<header><h1>{title}</h1><p class="quiet">{below}</p>{_last_words(course)}</header>'


def _last_words(course: RunProgress) -> str:
    """Say why a run has ended, or that nothing says so."""
    if isinstance(course.ended, Interrupted):
        return f"<p>{in_page(f'Interrupted {course.ended.in_words}')}.</p>"
    if isinstance(course.ended, Failure):
        whose = "" if course.ended.rank is None else f"Worker {course.ended.rank}: "
        told = f"{whose}{course.ended.in_words}"
        return f'<p class="error">{in_page(told)}</p>'
    if course.ended is None:
        return (
            f"<p>Its file tells of no end: when this page was made it was under way, or was cut "
            f"off. The last that was heard of it was at {in_page(moment(course.last_unix_s))}.</p>"
        )
    return ""


def _time_parts(page: Page, history: History) -> list[str]:
    if not history.phases.stretches:
        return [_nothing("Nothing was measured yet.")]
    figures = [times.by_phase(history), times.by_worker(history)]
    heat = times.waiting(history)
    lines = timelines(history)
    if heat is not None:
        figures.append(heat)
    figures += lines
    numbers = range(len(page.figures), len(page.figures) + len(figures))
    places = page.place(figures)
    said = [times.in_words(history.phases), times.left_out(history.phases)]
    return [
        f"<p>{in_page(' '.join(filter(None, said)))}</p>",
        legend_html(times.PHASE_KEYS, numbers),
        places,
    ]


def _happened(history: History) -> list[str]:
    parts = [f"<p>{in_page(_counts(history))}</p>"]
    if history.marks:
        began = history.course.began_unix_s
        rows = "".join(_mark_row(i, mark, began) for i, mark in enumerate(history.marks, 1))
        parts.append(
            "<table><thead><tr><th></th><th>Step</th><th>After</th><th>What</th></tr></thead>"
            f"<tbody>{rows}</tbody></table>"
        )
    if history.num_marks > MAX_MARKS:
        parts.append(_nothing(f"{history.num_marks - MAX_MARKS} more are not shown."))
    return parts


def _counts(history: History) -> str:
    said = []
    if not history.marks:
        said.append("Nothing went wrong." if history.course.ended else "Nothing went wrong so far.")
    if history.num_evaluations:
        said.append(f"{plural(history.num_evaluations, 'evaluation')}.")
    if history.num_checkpoints:
        what = plural(history.num_checkpoints, "checkpoint")
        said.append(f"{what}, the last after step {count(history.last_checkpoint or 0)}.")
    else:
        said.append("No checkpoint was written.")
    return " ".join(said)


def _mark_row(number: int, mark: Mark, began_unix_s: float) -> str:
    after = duration(mark.time_unix_s - began_unix_s)
    kind = _KIND_CLASSES.get(mark.kind, "")
    return (
        f'<tr><td class="number"><span class="badge {kind}">{number}</span></td>'
        f'<td class="number">{count(mark.step)}</td><td class="number">{in_page(after)}</td>'
        f"<td>{in_page(mark.text)}</td></tr>"
    )


def _identity(history: History) -> str:
    start = history.course.first
    if start is None:
        return _nothing("The file does not say.")
    fixed = [(key, value(one)) for key, one in identity(history).items()]
    where = [(f"{key} version", value(one)) for key, one in start.versions.items()]
    where += [(key.replace("_", " "), value(one)) for key, one in start.machine.items()]
    facts = [
        ("host", start.host),
        ("parameters", None if start.num_parameters is None else count(start.num_parameters)),
        ("workers at the begin", start.world_size),
        ("loader processes a worker", start.loader_workers),
        ("processes", _processes(start.pids)),
        ("folder", start.folder),
        ("command", shlex.join(start.command) or None),
    ]
    where += [(key, value(one)) for key, one in facts if one is not None]
    return (
        f'<div class="two"><div><h3>What fixes the result</h3>{table(fixed)}</div>'
        f"<div><h3>Where and how it ran</h3>{table(where)}</div></div>"
    )


def _processes(pids: Sequence[int | None]) -> str | None:
    if all(pid is None for pid in pids):
        return None
    return ", ".join("not known" if pid is None else str(pid) for pid in pids)


def _reproduce(history: History) -> list[str]:
    start, ended = history.course.first, history.course.ended
    if start is None or not start.command:
        parts = [_nothing("The file does not say what was run.")]
    else:
        change = f"cd {shlex.quote(start.folder)}\n" if start.folder else ""
        parts = [f"<pre>{in_page(change + command_line(history))}</pre>"]
    parts.append(
        "<p>The code, the data and all that stands above under “What fixes the result” must be the "
        "same. The number of workers, of loader processes, lost workers, stops and resumes may "
        "differ: they do not change a bit of the result.</p>"
    )
    if isinstance(ended, End) and ended.digest:
        parts.append(f"<p>Then the digest after step {count(ended.step)} is</p>")
        parts.append(f"<pre>{in_page(ended.digest)}</pre>")
    return parts


def _footer(history: History) -> str:
    said = [f"Made by Unisono at {moment(datetime.now(UTC).timestamp())}."]
    said.append("This page holds all that it shows and asks the network for nothing.")
    if history.num_unreadable:
        said.append(f"{plural(history.num_unreadable, 'line')} could not be read.")
    if history.course.num_again:
        steps = plural(history.course.num_again, "step")
        said.append(f"{steps} came out of order and are left out.")
    if history.metrics_left_out:
        left = ", ".join(name(one) for one in sorted(history.metrics_left_out))
        said.append(f"These metrics are not drawn, as there are too many: {left}.")
    return f"<footer><p>{in_page(' '.join(said))}</p></footer>"


def _nothing(said: str) -> str:
    return f'<p class="quiet">{in_page(said)}</p>'
