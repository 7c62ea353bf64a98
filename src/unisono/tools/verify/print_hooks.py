"""Watches the numbers that a program prints, because people believe what the terminal shows."""

from __future__ import annotations

import re
import sys
from typing import Any, final

from unisono.tools.verify.recorder import Recorder, wrap
from unisono.tools.verify.trace import Note

_NUMBER = re.compile(r"(?<![\w.])\d+\.\d+(?![\w.]*\w)|(?<![\w.])\d+\.\d+(?=%)")
_REDRAWN = ("\r", "it/s", "s/it")  # a progress bar, which has other numbers
_TEXTS_AT_MOST = 10_000


@final
class PrintHooks:
    """Hooks around the standard streams."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._num_texts = 0

    def install(self) -> None:
        """Install the hooks."""
        for stream in (sys.stdout, sys.stderr):
            if stream is not None:
                wrap(stream, "write", self._write)

    def _write(self, before: Any, text: Any, *rest: Any) -> Any:
        with self._recorder.guarded():
            if found := numbers_in(text):
                self._num_texts += 1
                if self._num_texts <= _TEXTS_AT_MOST and not self._recorder.is_exact:
                    self._recorder.write(Note("printed", found))
        return before(text, *rest)


def numbers_in(text: Any) -> list[str]:
    """Return the numbers with a decimal point in printed text; none from a progress bar."""
    if not isinstance(text, str) or any(mark in text for mark in _REDRAWN):
        return []
    return _NUMBER.findall(text)
