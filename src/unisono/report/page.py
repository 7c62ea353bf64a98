"""The report of one run: what came out, how it went, and how to get it again."""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator, Sequence

from unisono.quantities import amount, count, duration, percent, plural
from unisono.report import curves, times, why
from unisono.report.document import Page, cells, footer, legend_html, section, table
from unisono.report.events import End, Failure, Interrupted
from unisono.report.history import MAX_MARKS, History, identity
from unisono.report.marks import Mark
from unisono.report.run_progress import RunProgress
from unisono.report.text import SCRIPTS, in_page, moment, name, plain, value
from unisono.report.time_spent import PartOfTime


def report(history: History) -> str:
    """Return the page that tells of a run."""
    page = Page()
    learning = page.place(curves.learning(history))
    speed = page.place(curves.others(history))
    where = _time_parts(page, history)
    body = [
        _header(history),
        _tiles(history),
        section("Learning", learning or _nothing("No step has been finished yet.")),
        section("How it was learnt", speed) if speed else "",
        section("Why it is not faster", *_why(history)),
        section("Where the time goes", *where),
        section("What happened", *_happened(history)),
        section("What this run is", _identity(history)),
        section("How to get the same result", *_reproduce(history)),
        footer(*_left_out(history)),
    ]
    return page.document(f"{script_name(history)} – Unisono report", body)


def script_name(history: History) -> str:
    """Return what was run, in a few words: the first Python file of the command."""
    start = history.progress.first
    command = start.command if start else ()
    for word in command:
        if word.endswith(SCRIPTS):
            return name(os.path.basename(word))
    return name(command[0]) if command else "a run"


def command_line(history: History) -> str:
    """Return a command that runs it again, as a shell reads it, with as many threads a worker."""
    start = history.progress.first
    assert start is not None
    threads = start.identity.get("threads", 1)
    before = f"UNISONO_THREADS={threads} " if type(threads) is int and threads > 1 else ""
    return before + shlex.join(start.command)


def state(progress: RunProgress) -> tuple[str, str]:
    """Return how the run stands, and the class of its colour."""
    match progress.ended:
        case Interrupted():
            return "interrupted", "warn"
        case Failure():
            return "failed", "bad"
        case End(stopped_early=stopped_early):
            return "stopped early" if stopped_early else "finished", "good"
    return "no end yet", "warn"


def _header(history: History) -> str:
    progress, start = history.progress, history.progress.first
    word, colour = state(progress)
    said = []
    if start is not None:
        said.append(f"Began {moment(start.time_unix_s)}")
        said.append(start.host or "")
        said.append(value(start.machine["processor"]) if "processor" in start.machine else "")
    title = f'{in_page(script_name(history))}<span class="state {colour}">{word}</span>'
    below = in_page(" · ".join(filter(None, said)))
    return f'<header><h1>{title}</h1><p class="quiet">{below}</p>{_last_words(progress)}</header>'


def _last_words(progress: RunProgress) -> str:
    """Say why a run has ended, or that nothing says so."""
    match progress.ended:
        case Interrupted() as ended:
            return f"<p>{in_page(f'Interrupted {ended.in_words}')}.</p>"
        case Failure() as ended:
            whose = "" if ended.rank is None else f"Worker {ended.rank}: "
            return f'<p class="error">{in_page(whose + ended.in_words)}</p>'
        case End():
            return ""
    return (
        "<p>Its file tells of no end: when this page was made it was under way, or was cut off. "
        f"The last that was heard of it was at {in_page(moment(progress.last_unix_s))}.</p>"
    )


def _tiles(history: History) -> str:
    """Return what came out of a run as a list in HTML."""
    progress, start = history.progress, history.progress.latest
    goal = f"of {count(start.end_step)}" if start and start.end_step else ""
    if progress.epoch is not None:
        goal += f" · epoch {count(progress.epoch + 1)}"
    found = [_tile("Steps", count(progress.num_done), goal.strip(" ·"))]
    if (speed := history.mean_samples_per_second) is not None:
        found.append(_tile("Samples a second", count(speed), "in the mean"))
    found += _learning_tiles(history)
    shards = progress.first.shards if progress.first else None
    workers = count(len(progress.ranks)) if progress.ranks else "–"
    found.append(_tile("Workers", workers, plural(shards, "shard") if shards else ""))
    fits = f"in {progress.num_starts} fits" if progress.num_starts > 1 else ""
    found.append(_tile("Time in fit", duration(history.seconds or None), fits))
    found.append(_tile("Workers lost", count(progress.num_lost), _recovered(progress)))
    if isinstance(progress.ended, End) and progress.ended.digest:
        digest = plain(progress.ended.digest)[:12]
        found.append(_tile("Digest", digest, "equal in equal runs", ' class="long"'))
    return f'<ul class="tiles">{"".join(found)}</ul>'


def _tile(label: str, shown: str, below: str, css: str = "") -> str:
    return (
        f"<li><span>{in_page(label)}</span><b{css}>{in_page(shown)}</b>"
        f"<span>{in_page(below)}</span></li>"
    )


def _learning_tiles(history: History) -> Iterator[str]:
    loss = history.means.get("loss")
    if loss is not None and loss.last is not None:
        yield _tile("Loss", amount(loss.last), f"training, step {count(loss.last_step or 0)}")
    for metric in ("loss", "accuracy"):
        curve = history.validation.get(metric)
        if curve and (best := curve.best(is_low_good=metric == "loss")) is not None:
            step, value = best
            yield _tile(f"Best validation {metric}", amount(value), f"after {plural(step, 'step')}")


def _recovered(progress: RunProgress) -> str:
    if progress.num_went_back:
        return f"went back {plural(progress.num_went_back, 'time')}"
    if progress.num_lost:
        return "" if isinstance(progress.ended, Failure) else "and the run went on"
    return "none"


def _time_parts(page: Page, history: History) -> list[str]:
    if not history.phases.stretches:
        return [_nothing("Nothing was measured yet.")]
    first = len(page.figures)
    places = page.place([times.by_phase(history), times.by_worker(history)])
    said = [times.in_words(history.phases), times.left_out(history.phases)]
    return [
        f"<p>{in_page(' '.join(filter(None, said)))}</p>",
        legend_html(times.PHASE_KEYS, range(first, len(page.figures))),
        places,
    ]


def _why(history: History) -> Iterator[str]:
    if not history.phases.stretches:
        yield _nothing("Nothing was measured yet.")
        return
    items = "".join(f"<li>{in_page(one)}</li>" for one in why.said(history))
    yield f'<ul class="said">{items}</ul>'
    yield table(map(_part_row, why.parts(history)), ["Part of the time", "", ""])


def _part_row(part: PartOfTime) -> str:
    return (
        f"<td>{in_page(part.name)}<small>{in_page(part.explained)}</small></td>"
        f'<td class="number">{in_page(duration(part.seconds))}</td>'
        f'<td class="number">{in_page(percent(part.share, 1))}</td>'
    )


def _happened(history: History) -> Iterator[str]:
    yield f"<p>{in_page(' '.join(_counts(history)))}</p>"
    if history.marks:
        began = history.progress.began_unix_s
        rows = (_mark_row(i, mark, began) for i, mark in enumerate(history.marks, 1))
        yield table(rows, ["", "Step", "After", "What"])
    if history.num_marks > MAX_MARKS:
        yield _nothing(f"{history.num_marks - MAX_MARKS} more are not shown.")


def _counts(history: History) -> Iterator[str]:
    progress = history.progress
    if not history.marks:
        yield "Nothing went wrong." if progress.ended else "Nothing went wrong so far."
    if progress.num_evaluations:
        yield f"{plural(progress.num_evaluations, 'evaluation')}."
    if progress.checkpoint is None:
        yield "No checkpoint was written."
    else:
        kept = plural(progress.num_checkpoints, "checkpoint")
        yield f"{kept}, the last after step {count(progress.checkpoint.step)}."


def _mark_row(number: int, mark: Mark, began_unix_s: float) -> str:
    after = duration(mark.time_unix_s - began_unix_s)
    return (
        f'<td class="number"><span class="badge {mark.severity.value}">{number}</span></td>'
        f'<td class="number">{count(mark.step)}</td><td class="number">{in_page(after)}</td>'
        f"<td>{in_page(mark.text)}</td>"
    )


def _identity(history: History) -> str:
    start = history.progress.first
    if start is None:
        return _nothing("The file does not say.")
    fixed = identity(history)
    where = {f"{key} version": one for key, one in start.versions.items()}
    where |= {key.replace("_", " "): one for key, one in start.machine.items()}
    facts = {
        "host": start.host,
        "parameters": None if start.num_parameters is None else count(start.num_parameters),
        "workers at the begin": start.world_size,
        "loader processes a worker": start.loader_workers,
        "processes": _processes(start.pids),
        "folder": start.folder,
        "command": shlex.join(start.command) or None,
    }
    where |= {key: one for key, one in facts.items() if one is not None}
    tables = [table(cells(key, value(one)) for key, one in some.items()) for some in (fixed, where)]
    return (
        f'<div class="two"><div><h3>What fixes the result</h3>{tables[0]}</div>'
        f"<div><h3>Where and how it ran</h3>{tables[1]}</div></div>"
    )


def _processes(pids: Sequence[int | None]) -> str | None:
    if all(pid is None for pid in pids):
        return None
    return ", ".join("not known" if pid is None else str(pid) for pid in pids)


def _reproduce(history: History) -> Iterator[str]:
    start, ended = history.progress.first, history.progress.ended
    if start is None or not start.command:
        yield _nothing("The file does not say what was run.")
    else:
        change = f"cd {shlex.quote(start.folder)}\n" if start.folder else ""
        yield f"<pre>{in_page(change + command_line(history))}</pre>"
    yield (
        "<p>The code, the data and all that stands above under “What fixes the result” must be the "
        "same. The number of workers, of loader processes, lost workers, stops and resumes may "
        "differ: they do not change a bit of the result.</p>"
    )
    if isinstance(ended, End) and ended.digest:
        yield f"<p>Then the digest after step {count(ended.step)} is</p>"
        yield f"<pre>{in_page(ended.digest)}</pre>"


def _left_out(history: History) -> Iterator[str]:
    if history.num_unreadable:
        yield f"{plural(history.num_unreadable, 'line')} could not be read."
    if history.progress.num_again:
        steps = plural(history.progress.num_again, "step")
        yield f"{steps} came out of order and are left out."
    if history.metrics_left_out:
        left = ", ".join(name(one) for one in sorted(history.metrics_left_out))
        yield f"These metrics are not drawn, as there are too many: {left}."


def _nothing(said: str) -> str:
    return f'<p class="quiet">{in_page(said)}</p>'
