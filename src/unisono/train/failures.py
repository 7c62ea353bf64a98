"""What one worker raises, all raise: so a program that catches it goes on everywhere alike.

Its name and its words travel, never the object. The others make one of the same class, which their
program has, too; where the class wants more than words, a RuntimeError.
"""

from __future__ import annotations

import contextlib
import json
import sys
import traceback

_PACKAGE = __name__.partition(".")[0] + "."


def failure(error: Exception, rank: int) -> bytes:
    """Put an exception of this worker into words for the others."""
    kind = type(error)
    told = {"module": kind.__module__, "name": kind.__qualname__, "text": str(error)}
    if not _is_refusal(error):
        trace = "".join(traceback.format_exception(error))
        told["note"] = f"On rank {rank} that was:\n{trace}"
    return json.dumps(told).encode()


def raised(told: bytes) -> Exception:
    """Make an exception of what another worker has told of its own."""
    said = json.loads(told)
    kind = getattr(sys.modules.get(said["module"]), said["name"], None)
    error: Exception = RuntimeError(f"{said['name']}: {said['text']}")
    if isinstance(kind, type) and issubclass(kind, Exception):
        with contextlib.suppress(Exception):
            error = kind(said["text"])
    if "note" in said:
        error.add_note(said["note"])
    return error


def _is_refusal(error: Exception) -> bool:
    """Tell whether it was raised here, with a sentence of ours, so that no frame says more."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    return bool(frames) and frames[-1].f_globals.get("__name__", "").startswith(_PACKAGE)
