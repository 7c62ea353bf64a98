"""Runs what may crash or hang in a process of its own, and reads the JSON that it prints."""

from __future__ import annotations

import json
import os
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
    child = subprocess.Popen(
        [sys.executable, "-m", module],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        start_new_session=True,
        env=dict(environ),
    )
    try:
        printed, complaint = child.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        raise ChildFailedError(f"no answer within {timeout_s:.0f} s") from None
    finally:
        _end(child)
    try:
        answer: dict[str, Any] = json.loads(printed.splitlines()[-1])
    except (ValueError, IndexError):
        raise ChildFailedError(_why(child.returncode, complaint)) from None
    return answer


def _end(child: subprocess.Popen[str]) -> None:
    """Kill what is left of it; workers end with their launcher."""
    if child.poll() is None:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(child.pid, signal.SIGKILL)
        child.communicate()


def _why(status: int, complaint: str) -> str:
    lines = [line for line in complaint.splitlines() if line.strip()]
    if lines:
        return lines[-1].strip()[:300]
    with suppress(ValueError):
        return f"killed by {signal.Signals(-status).name}"
    return f"exit status {status}"
