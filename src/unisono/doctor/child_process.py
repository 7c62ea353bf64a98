"""Runs what may crash or hang in a process of its own, and reads the JSON that it prints."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from typing import Any


class ChildFailedError(Exception):
    """The process has ended without an answer, or has taken too long."""


def answer_of(module: str, timeout_s: float, environ: Mapping[str, str]) -> dict[str, Any]:
    """Run ``python -m MODULE`` and return the JSON of the last line that it prints.

    Args:
        module: its name.
        timeout_s: after which it is killed, in seconds.
        environ: the variables it gets.

    Raises:
        ChildFailedError: there is no answer; says why.
    """
    try:
        done = subprocess.run(
            [sys.executable, "-m", module],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=timeout_s,
            start_new_session=True,  # Ctrl-C is not for it: `run` kills it, and so its workers end
            env=dict(environ),
        )
    except subprocess.TimeoutExpired:
        raise ChildFailedError(f"no answer within {timeout_s:.0f} s") from None
    try:
        answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    except (ValueError, IndexError):
        raise ChildFailedError(_why(done.returncode, done.stderr)) from None
    return answer


def _why(status: int, complaint: str) -> str:
    lines = [line for line in complaint.splitlines() if line.strip()]
    if lines:
        return lines[-1].strip()[:300]
    with suppress(ValueError):
        return f"killed by {signal.Signals(-status).name}"
    return f"exit status {status}"
