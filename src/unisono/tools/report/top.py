"""A live view of a run in a terminal: read new events, check the processes, draw, and wait.

It never writes to the run's folder. If there is little room, lines are cut at the end, and workers
without anything notable are left out::
    title · facts
    step 3 of 9  ━━━━━━━━━━━━━  33 %
    numbers · what was kept
    trouble · message
    ! what slows the steps
    rank  state  time goes to …        one line per worker

Signals are blocked and waited for, so that none arrives while the view is drawn: Ctrl-C and SIGTERM
end it and restore the terminal, Ctrl-Z restores the terminal for a while, and a new size is drawn
at once.
"""

from __future__ import annotations

import math
import os
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import partial
from typing import final

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from unisono.runtime.notices import say, shown, size
from unisono.runtime.plainfile import path_given
from unisono.runtime.procfs import holder_of
from unisono.tools.report.run_progress import GONE, processes_of
from unisono.tools.report.view import USUAL, Condition, RunStatus, View, WorkerLine, see
from unisono.training.events.follow import FILE_NAME, EventReader, events_file, run_folder

REFRESH_S = 0.5
RECENT_BYTES = 1 << 16  # some dozens of steps each time: enough
_JUDGED_EVERY_S = 2.0
_WAITED_FOR = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGTSTP, signal.SIGWINCH)


@final
class LiveView:
    """Follows one run."""

    def __init__(self, directory: str | os.PathLike[str], host: str = os.uname().nodename) -> None:
        self._path, self._host = path_given(directory) / FILE_NAME, host
        self._judged_at_s = -math.inf
        self._begin()

    def current(self) -> View:
        """Return the current view of the run."""
        try:
            for event in self._reader.new_events(self._begin_run):
                self._status.add(event)
        except ValueError:
            if os.path.lexists(self._path):
                raise
            self._begin()  # does not exist yet, or was renamed for the next run
        start = self._status.progress.latest
        is_here = start is not None and start.host == self._host
        found = processes_of(self._status.progress.named) if is_here else {}
        if start is not None and time.monotonic() >= self._judged_at_s + _JUDGED_EVERY_S:
            self._judged_at_s = time.monotonic()
            from unisono.training.events.slowness import slowdowns_in  # numpy is loaded with it

            with suppress(OSError):
                self._status.findings = slowdowns_in(self._path, vars(start), is_newest=True) or ()
        is_held = set(found.values()) != {GONE} or holder_of(self._path.parent) is not None
        return see(self._status, found, time.time(), is_held=is_held)

    def _begin(self) -> None:
        self._reader = EventReader(self._path, RECENT_BYTES)
        self._begin_run()

    def _begin_run(self) -> None:
        self._status = RunStatus()


def show(directory: str | os.PathLike[str], console: Console, *, once: bool) -> None:
    """Show a run until it has ended, or until Ctrl-C; without a terminal, show it once.

    Raises ValueError if there is nothing to show, DataFormatError if a newer version wrote it.
    """
    watch = LiveView(directory)
    if once or not console.file.isatty() or console.is_dumb_terminal:
        path = events_file(directory)
        view = watch.current()
        if view.condition is Condition.AWAITED:
            raise ValueError(
                f"{str(path)!r} must describe a run, but has no events yet: wait until it has "
                "begun, or run this on a terminal without `--once`, which waits for it."
            )
    else:
        if not path_given(directory).is_dir():
            run_folder(directory, may_come=True)
            say(f"waiting for {shown(directory, 1000)}, which a run creates when it begins")
        view = _show_live(watch, console)
    console.print(draw(view, console))


def _show_live(watch: LiveView, console: Console) -> View:
    while True:
        before = signal.pthread_sigmask(signal.SIG_BLOCK, _WAITED_FOR)
        try:
            with Live(console=console, screen=True, auto_refresh=False) as live:
                view, reason = _until_a_signal(watch, live, console)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        if reason != signal.SIGTSTP:
            return view
        os.kill(os.getpid(), signal.SIGSTOP)  # Ctrl-Z, with the terminal restored


def _until_a_signal(watch: LiveView, live: Live, console: Console) -> tuple[View, int | None]:
    while True:
        view = watch.current()
        if view.is_over:
            return view, None
        live.update(draw(view, console, console.height), refresh=True)
        found = signal.sigtimedwait(_WAITED_FOR, REFRESH_S)
        if found is not None and found.si_signo != signal.SIGWINCH:
            return view, found.si_signo


_BAR_CELLS = 40
_ALL_COLUMNS_CELLS = 80  # a narrower terminal has no room for phases
_CONDITIONS = {
    Condition.RUNNING: "green",
    Condition.STILL: "yellow",
    Condition.FAILED: "bold red",
    Condition.GONE: "bold red",
}
_STATES = {"stopped": "yellow", "gone": "red", "lost": "red", "running": "green"}
_PHASES = {
    "loading": ("load", "cyan"),
    "forward": ("fwd", "green"),
    "backward": ("bwd", "blue"),
    "waiting": ("wait", "red"),
    "summing": ("sum", "magenta"),
    "updating": ("upd", "yellow"),
}


def draw(view: View, console: Console, height: int | None = None) -> Group:
    """Draw a view; `height` is the terminal's, or None to cut nothing."""
    lines = [line for line in _lines(view, console) if line]
    shown, room = view.workers, math.inf if height is None else height - len(lines) - 1
    if len(shown) > room:
        shown = worth_telling(shown, max(int(room) - 1, 0))
    if view.workers:
        lines.append(_table(view.workers, shown, console.width))
    if more := len(view.workers) - len(shown):
        lines.append(Text(f"and {more:,} more workers", "dim"))
    for line in lines if height is not None else ():
        if isinstance(line, Text):
            line.no_wrap, line.overflow = True, "ellipsis"
    return Group(*lines)


def worth_telling(workers: Sequence[WorkerLine], num_workers: int) -> tuple[WorkerLine, ...]:
    """Return the notable workers, then the first ones, up to `num_workers`; sorted by rank."""
    order = sorted(workers, key=lambda w: (w.state in USUAL and not w.is_slow, w.rank))
    return tuple(sorted(order[:num_workers], key=lambda worker: worker.rank))


def _lines(view: View, console: Console) -> Iterator[Text | Table]:
    """Yield the lines above the table, from top to bottom; some are empty."""
    style = _CONDITIONS.get(view.condition, "")
    facts = [Text(fact, style if at == 0 else "") for at, fact in enumerate(view.facts)]
    yield Text(" · ").join([*([Text(view.title, "bold")] if view.title else []), *facts])
    yield _progress(view, console)
    yield Text(" · ".join(view.numbers))
    yield Text(" · ".join(view.kept))
    yield Text(view.trouble, "yellow")
    yield Text(view.message, style)
    yield Text(view.slowness and f"! {view.slowness}", "yellow")


def _progress(view: View, console: Console) -> Text | Table:
    if view.condition is Condition.AWAITED:
        return Text()
    of = f" of {view.end_step:,}" if view.end_step else ""
    words = Text(" · ".join([f"step {view.num_done:,}{of}", *view.position]))
    if not view.end_step:
        return words
    percent = f"{int(100 * min(view.num_done / view.end_step, 1.0))} %"
    num_cells = min(console.width - words.cell_len - len(percent) - 4, _BAR_CELLS)
    if num_cells < _BAR_CELLS // 4:
        return words
    bar = ProgressBar(view.end_step, view.num_done, num_cells, style="dim", complete_style="green")
    line = Table.grid(padding=(0, 2, 0, 0))
    line.add_row(words, bar, percent)
    return line


def _table(workers: Sequence[WorkerLine], shown: Sequence[WorkerLine], width: int) -> Table:
    is_wide, has_devices = width >= _ALL_COLUMNS_CELLS, any(one.device_bytes for one in workers)
    table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False)
    add = partial(table.add_column, justify="right", no_wrap=True)
    add("rank")
    if is_wide:
        add("pid", style="dim")
    add("state", justify="left", min_width=7)
    for head, style in _PHASES.values() if is_wide else ():
        add(head, style=style, min_width=4)
    add("ms/step", min_width=8)
    if has_devices:
        add("device", min_width=8)
    add("memory", min_width=8)
    for one in shown:
        shares = [f"{one.shares[p]:.0%}" if one.shares else "–" for p in _PHASES]
        table.add_row(
            str(one.rank),
            *(["–" if one.pid is None else str(one.pid)] if is_wide else []),
            Text(one.state, _STATES.get(one.state, "dim")),
            *(shares if is_wide else []),
            _work(one),
            *([size(one.device_bytes)] if has_devices else []),
            size(one.memory_bytes),
            style="dim" if one.state in ("gone", "lost") else None,
        )
    return table


def _work(worker: WorkerLine) -> Text:
    if worker.work_s is None:
        return Text("–")
    ms = worker.work_s * 1e3
    shown = f"{ms:,.0f}" if ms >= 1000 else f"{ms:.3g}"
    return Text(f"{shown}!", "bold yellow") if worker.is_slow else Text(shown)
