"""The commands that observe, such as `top`, `where`, `report`, `doctor` and `explain`."""

from __future__ import annotations

import contextlib
import os
import re
import shlex
from importlib.resources import files
from pathlib import Path

import click

from unisono.tools.cli.endings import Refusal, answering, leave, refusing


@click.command(short_help="List the checkpoints of a run.")
@click.argument("directory")
def checkpoints(directory: str) -> None:
    """List the checkpoints in DIRECTORY, newest first, each checked to the last byte.

    DIRECTORY is what the script passed as `Trainer(..., directory=...)`. A run that starts again
    resumes from the first line that says "whole".

    \b
    Example:
      unisono checkpoints runs/mnist
    """
    from unisono.runtime.checkpoint.run_directory import RunDirectory
    from unisono.runtime.notices import size
    from unisono.training.events.follow import run_folder

    try:
        with refusing():
            entries = RunDirectory(run_folder(directory)).entries()
    except OSError as error:
        raise Refusal(f"the checkpoints in DIRECTORY must be readable, but: {error}.") from None
    for entry in entries:
        whole = f"whole, {size(entry.num_bytes)}"
        state = f"damaged: {entry.trouble}" if entry.trouble else whole
        click.echo(f"{entry.path.name}  {state}")
    if not entries:
        click.echo(f"no checkpoints in {directory}")


@click.command(short_help="Watch a run, live.")
@click.option("--once", is_flag=True, help="Print the current state once; also done in a pipe.")
@click.argument("directory")
def top(directory: str, once: bool) -> None:
    """Show the run in DIRECTORY: one line for each worker, until it has ended or Ctrl-C.

    DIRECTORY is what the script passes as `Trainer(..., directory=...)`. Nothing is written there,
    and the run is not slowed down.

    Each line shows what fraction of a worker's newest steps each phase took, the worker's time per
    step without waiting for others, and, if the run is on this machine, the state of its process
    and its memory. `!` marks a worker that the others wait for.

    \b
    Examples:
      unisono top runs/mnist           live, twice a second
      unisono top --once runs/mnist    once, for a script
    """
    from unisono.runtime.console import Output
    from unisono.tools.report.top import show

    with refusing():
        show(directory, Output(), once=once)


@click.command(short_help="Show where each rank is, and who waits for whom.")
@click.argument("target", metavar="DIRECTORY|PID")
def where(target: str) -> None:
    """Show where every rank of a job is right now: its function and line, and its stack.

    DIRECTORY is what the script passes as `Trainer(..., directory=...)`; PID is the launcher, any
    worker, or torchrun. If ranks wait for one that has not arrived, the first line names it.

    Nothing in the job is stopped or slowed down. Stacks are read from outside with py-spy, so this
    also works for a rank that is stopped, or busy in native code.

    \b
    Examples:
      unisono where runs/mnist
      unisono where 4711
    """
    from unisono.runtime.hangs import where as finding

    with refusing():
        text = finding.where(_process_of(target), os.getcwd())
    click.echo(text)


def _process_of(target: str) -> int:
    from unisono.runtime.procfs import holder_of
    from unisono.training.events.follow import run_folder

    if target.isdecimal() and not os.path.isdir(target):
        return int(target)
    pid = holder_of(Path(run_folder(target)))
    if pid is None:
        raise ValueError(
            f"DIRECTORY must be that of a run that is running on this machine, but nothing runs "
            f"in {target!r}: if a run was there, `unisono top --once {shlex.quote(target)}` shows "
            f"how it ended; a PID names any other job."
        )
    return pid


@click.command(short_help="Draw what happened in a run.")
@click.argument("directory")
@click.option(
    "-o",
    "--output",
    metavar="FILE",
    help="The page to write; report.html in DIRECTORY by default.",
)
def report(directory: str, output: str | None) -> None:
    """Draw what happened in DIRECTORY as one page for a browser.

    DIRECTORY is what the script passed as `Trainer(..., directory=...)`; the run may be running.
    The page shows metrics, speed, where the time went, what each worker did, what went wrong, and
    how to get the same result. It contains everything it shows and needs no network.

    \b
    Examples:
      unisono report runs/one                        writes runs/one/report.html
      unisono report runs/one -o page.html
    """
    from unisono.tools.report.files import write_report

    with refusing():
        path = write_report(directory, output)
    click.echo(path)


@click.command(short_help="Draw several runs together.")
@click.argument("directories", nargs=-1, metavar="DIRECTORY DIRECTORY...")
@click.option(
    "-o",
    "--output",
    metavar="FILE",
    default="compare.html",
    show_default=True,
    help="The page to write.",
)
def compare(directories: tuple[str, ...], output: str) -> None:
    """Draw the runs in several DIRECTORIES together, as one page for a browser.

    The page shows their curves, the settings that determine the result and differ between runs, and
    whether they ended with the same digest.

    \b
    Example:
      unisono compare runs/one runs/two -o page.html
    """
    from unisono.tools.report.files import write_comparison

    with refusing():
        path = write_comparison(directories, output)
    click.echo(path)


@click.command(short_help="Check what this machine offers.")
@click.option("--json", "as_json", is_flag=True, help="Print what was seen as JSON.")
@answering()
def doctor(as_json: bool) -> None:
    """Check what this machine offers for training, and what is wrong with it.

    Looks at torch and GPUs, cores, memory, a container's limits, open files, whether stacks of
    workers can be read, and the variables of this shell. Nothing is changed. `unisono plan`
    measures how fast a program is here.

    ✓ good, ! works but could be better, ✗ wrong, ? could not be read.

    \b
    Examples:
      unisono doctor
      unisono doctor --json > machine.json

    \b
    Exit status:
      0     nothing is wrong
      1     something is: a line with ✗
      2     the command line was wrong, or doctor failed
      130   Ctrl-C
    """
    import json
    from dataclasses import asdict

    from unisono.runtime.console import Output
    from unisono.tools.doctor.machine_checks import examine, summary
    from unisono.tools.verify.findings import WRONG, print_findings

    try:
        seen = examine(os.environ)
    except KeyboardInterrupt:
        leave(130)
    with contextlib.suppress(BrokenPipeError):
        if as_json:
            checks = [asdict(one) for one in seen]
            click.echo(json.dumps({"checks": checks}, indent=2, ensure_ascii=False))
        else:
            console = Output()
            print_findings(console, seen)
            console.print(summary(seen), soft_wrap=True, markup=False)
    leave(int(any(one.verdict == WRONG for one in seen)))


_LEAST = 8  # characters of a message that are enough to find it


@click.command(short_help="Say what a message means, and what to do.")
@click.argument("message", nargs=-1, required=True)
def explain(message: tuple[str, ...]) -> None:
    """Print causes and remedies of MESSAGE: an error's name, its message, or the beginning of it.

    \b
    Examples:
      unisono explain MismatchError
      unisono explain "`shards` must be at least the number of workers"
    """
    text = " ".join(message)
    if not (found := explanations(text)):
        names = ", ".join(_sections())
        raise Refusal(
            f"MESSAGE must be an error of Unisono ({names}), or a sentence of the page on "
            f"messages, but is {text!r}: paste what follows the name of the error. A message "
            f"that is not on the page says what to do."
        )
    click.echo("\n\n".join(found))


def explanations(text: str) -> list[str]:
    """Return the page's explanations of the sentences and error classes in a text."""
    rows = [row for row in _sentences() if _is_in(row[0].lower(), text.lower())]
    # DIRECTORY is what a command gets, `directory` what a program passes.
    found = [row for sentence, row in rows if _is_in(sentence, text)] or [row for _, row in rows]
    sections = _sections().items()
    return found + [section for name, section in sections if re.search(rf"\b{name}\b", text)]


def _page() -> str:
    """Return ``docs/errors.md``, which the package has as a link, with links as plain text."""
    page = files("unisono.tools").joinpath("errors.md").read_text(encoding="utf-8")
    return re.sub(r"\[([^\]]+)\]\([^)]+\)", r"\1", page)


def _sections() -> dict[str, str]:
    parts = re.split(r"^#+ (.+)\n", _page(), flags=re.M)[1:]
    named = zip(parts[0::2], parts[1::2], strict=True)
    return {name: f"{name}\n\n{text.strip()}" for name, text in named if name.endswith("Error")}


def _sentences() -> list[tuple[str, str]]:
    rows = re.findall(r"^\| (.*?) \| (.*) \| (.*?) \|$", _page(), re.M)
    return [
        (message, f"{message}\n\nCause: {cause}\nRemedy: {remedy}")
        for message, cause, remedy in rows
        if message != "message"
    ]


def _is_in(sentence: str, text: str) -> bool:
    """Return whether a text has a sentence, in which … matches anything, or its beginning."""
    pieces = [words for piece in sentence.split("…") if (words := _plain(piece))]
    said = _plain(re.sub(r"^[\w.]+: ", "", text))  # without the name of the error
    at = [said.find(piece) for piece in pieces]
    is_whole = -1 not in at and at == sorted(at)
    return is_whole or (len(said) >= _LEAST and any(piece.startswith(said) for piece in pieces))


def _plain(text: str) -> str:
    return " ".join(text.replace("`", "").split())
