"""A live view of a run in a terminal: read what is new, look at the processes, draw; then wait.

It never writes to the run's folder. ``view.py`` decides what is shown, ``drawing.py`` where.

Signals are blocked and waited for, so that none comes while something is drawn: Ctrl-C and SIGTERM
end the view and give the terminal back as it was, Ctrl-Z for a while, and another size is drawn at
once.
"""

from __future__ import annotations

import math
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from rich.console import Console
from rich.live import Live

from unisono.report.drawing import draw
from unisono.report.follow import FILE_NAME, EventReader, events_file, run_folder
from unisono.report.process_status import processes_of
from unisono.report.status import RunStatus
from unisono.report.view import Condition, View, see

REFRESH_S = 0.5
RECENT_BYTES = 1 << 16  # some dozens of steps each time: more say nothing more, and cost
_JUDGED_EVERY_S = 2.0
_WAITED_FOR = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGTSTP, signal.SIGWINCH)


class Watch:
    """Looks at one run again and again. Final.

    Args:
        directory: the run's folder.
        host: the name of this machine.
    """

    def __init__(self, directory: str | os.PathLike[str], host: str | None = None) -> None:
        self._path = Path(directory) / FILE_NAME
        self._host = os.uname().nodename if host is None else host
        self._judged_at_s = -math.inf
        self._begin()

    def look(self) -> View:
        """Return the view of the run now.

        Raises:
            ValueError: the event file cannot be read.
            DataFormatError: a newer version wrote it.
        """
        try:
            for event in self._reader.new_events(self._begin_run):
                self._status.add(event)
        except ValueError:
            if os.path.lexists(self._path):
                raise
            self._begin()  # not there yet, or set aside for the next run
        start = self._status.progress.latest
        is_here = start is not None and start.host == self._host
        found = processes_of(self._status.progress.named) if is_here else {}
        self._judge()
        return see(self._status, found, time.time())

    def _judge(self) -> None:
        """Look for what slows the newest steps, now and then."""
        start, now_s = self._status.progress.latest, time.monotonic()
        if start is None or now_s < self._judged_at_s + _JUDGED_EVERY_S:
            return
        self._judged_at_s = now_s
        from unisono.report.slowness import slowdowns_in  # numpy is loaded with it

        with suppress(OSError):
            self._status.findings = slowdowns_in(self._path, vars(start), is_newest=True) or ()

    def _begin(self) -> None:
        self._reader = EventReader(self._path, RECENT_BYTES)
        self._begin_run()

    def _begin_run(self) -> None:
        self._status = RunStatus()


def show(directory: str | os.PathLike[str], console: Console, *, once: bool) -> None:
    """Show a run until it has ended, or until Ctrl-C.

    Args:
        directory: what the script passed as `Trainer(..., directory=...)`.
        console: where to. What is no terminal gets one view.
        once: show how it stands, and end.

    Raises:
        ValueError: it is no run's folder, no run has begun there where one view was asked for, or
            the event file cannot be read.
        DataFormatError: a newer version wrote it.
    """
    watch = Watch(directory)
    if once or not console.file.isatty() or console.is_dumb_terminal:
        view = _look_once(watch, directory)
    else:
        run_folder(directory)
        view = _show_live(watch, console)
    console.print(draw(view, console))


def _look_once(watch: Watch, directory: str | os.PathLike[str]) -> View:
    path = events_file(directory)
    view = watch.look()
    if view.condition is Condition.AWAITED:
        raise ValueError(
            f"{str(path)!r} must tell of a run, but tells nothing yet: wait until it has begun, or "
            "run this on a terminal without `--once`, which waits for it."
        )
    return view


def _show_live(watch: Watch, console: Console) -> View:
    while True:
        with _signals_waited_for(), Live(console=console, screen=True, auto_refresh=False) as live:
            view, reason = _until_a_signal(watch, live, console)
        if reason != signal.SIGTSTP:
            return view
        os.kill(os.getpid(), signal.SIGSTOP)  # Ctrl-Z, with the terminal as it was before


def _until_a_signal(watch: Watch, live: Live, console: Console) -> tuple[View, int | None]:
    while True:
        view = watch.look()
        if view.is_over:
            return view, None
        live.update(draw(view, console, console.height), refresh=True)
        found = signal.sigtimedwait(_WAITED_FOR, REFRESH_S)
        if found is not None and found.si_signo != signal.SIGWINCH:
            return view, found.si_signo


@contextmanager
def _signals_waited_for() -> Iterator[None]:
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _WAITED_FOR)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
