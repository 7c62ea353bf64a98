"""The process that copies between a local folder and a URL: no step ever waits for it.

Its configuration is a line of JSON: ``url``, ``folder``, ``session``, ``pid`` of the requesting
process, ``owns`` (whether it copies; otherwise it only fetches, for hosts other than the owner's),
``resumes``, ``keep``, ``at_most`` (useful bytes by file) and ``timeout_s``. It answers in a file.
When its standard input has more data, or ends, it copies the rest and exits.
"""

from __future__ import annotations

import errno
import json
import os
import select
import signal
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, final

from unisono.errors import CheckpointError
from unisono.runtime.checkpoint.remote import answer_path, masked, refusal
from unisono.runtime.checkpoint.remote_copy import PAUSE_S, Copy, TakenError
from unisono.runtime.notices import say
from unisono.runtime.plainfile import written_whole
from unisono.runtime.signals import ENDING_SIGNALS
from unisono.runtime.timeouts import NOTICE

LOOK_S = 0.5
_NO_USE = (PermissionError, FileNotFoundError, NotImplementedError, ImportError, ValueError)
_FULL = (errno.ENOSPC, errno.EDQUOT)


@final
class Keeper:
    """Copies until the job has ended, within a time limit even if something hangs."""

    def __init__(self, work: dict[str, Any]) -> None:
        self._work, self._place = work, masked(work["url"])
        self.copied: Copy | None = None
        self._trouble = ""
        self._ends = threading.Event()  # set once the job has ended

    def open(self) -> str:
        """Open the copy, with retries; return why it cannot be used, or an empty string."""
        until_s = time.monotonic() + self._work["timeout_s"]
        while True:
            try:
                copy = Copy(self._work)
                copy.open()
                self.copied, self._trouble = copy, ""
                return ""
            except CheckpointError as error:
                return masked(str(error), self._work["url"])
            except Exception as error:
                trouble = self._in_words(error)
                is_final = isinstance(error, _NO_USE) or getattr(error, "errno", None) in _FULL
                if is_final or "redential" in trouble or time.monotonic() > until_s:
                    return refusal(self._work["url"], f"cannot: {trouble}")
                if not self._trouble:
                    say(f"{self._place} cannot be reached ({trouble}): trying again")
                self._trouble = trouble
                time.sleep(PAUSE_S)

    def copy(self, copy: Copy) -> None:
        """Copy what is new, until everything is copied after the job has ended."""
        is_over = threading.Event()
        threading.Thread(target=copy.keep_beating, args=(is_over,), daemon=True).start()
        while not is_over.is_set():
            is_last = self._ends.is_set()
            try:
                copy.round(is_last=is_last)
                if self._trouble:
                    say(f"{self._place} can be reached again")
                self._trouble = ""
                if is_last:
                    is_over.set()
                self._ends.wait(LOOK_S)
            except TakenError:
                say(f"{self._place} belongs to another job now: nothing more is copied there")
                is_over.set()
            except Exception as error:
                if not self._trouble:
                    say(
                        f"{self._place} cannot be written ({self._in_words(error)}): training "
                        f"continues, and copying is tried again"
                    )
                self._trouble = self._in_words(error)
                time.sleep(PAUSE_S)

    def watch(self) -> None:
        """Wait for the job to end, then exit when the time limit is reached."""
        select.select([sys.stdin], [], [])
        self._ends.set()
        first_s = min(NOTICE.in_s(), self._work["timeout_s"])
        rest_s = self._work["timeout_s"] - first_s
        if self.copied is not None:
            time.sleep(first_s)
            self._tell_missing(f"waiting up to {rest_s:.0f} s")
            time.sleep(rest_s)
            self._tell_missing(
                f"{self._trouble or 'it takes too long'}; the copy is in {self._work['folder']}: "
                f"start the program again on this machine, or copy that folder"
            )
        os._exit(0)

    def _tell_missing(self, rest: str) -> None:
        with suppress(OSError):
            if self.copied is not None and (missing := self.copied.missing()):
                say(f"{self._place} lacks {missing}: {rest}")

    def _in_words(self, error: Exception) -> str:
        words = (str(error).splitlines() or [""])[0]
        return masked(f"{type(error).__name__}: {words}".rstrip(". :"), self._work["url"])


def main() -> None:
    """Run the copying process."""
    for signum in ENDING_SIGNALS:  # all processes of a job may receive them
        signal.signal(signum, signal.SIG_IGN)
    work = json.loads(sys.stdin.readline())
    answer, keeper = answer_path(Path(work["folder"]), work["session"]), Keeper(work)
    threading.Thread(target=keeper.watch, daemon=True).start()
    try:
        error = keeper.open()
        with written_whole(answer) as file:
            file.write(json.dumps(error).encode())
        if work["owns"] and keeper.copied is not None:
            keeper.copy(keeper.copied)
    except OSError as error:
        say(f"the copy of `directory` must be a folder that can be written, but {error}")
    finally:
        os._exit(0)  # a thread may hang
