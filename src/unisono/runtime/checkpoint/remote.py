"""A run directory that outlives the machine: `directory` is a URL, with a local copy.

::

    workers, launcher ──► local folder ──► a process (remote_process.py) ──► URL

Training only reads and writes the local folder. The process that writes checkpoints there, the
launcher or a worker without one, starts the process that copies them and waits for it at exit.
"""

from __future__ import annotations

import atexit
import hashlib
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, unquote, urlsplit

from unisono.errors import CheckpointError
from unisono.runtime.notices import say, shown
from unisono.runtime.plainfile import open_plain
from unisono.runtime.procfs import OUTLIVES, NotThereError, wait_for
from unisono.runtime.signals import signals_held_back
from unisono.runtime.timeouts import REMOTE

LEASE_S = 60.0  # a job elsewhere counts as dead after this long without a sign of life
GRACE_S = 5.0
_URL = re.compile(r"[a-z][\w+.-]+:/", re.ASCII | re.IGNORECASE)
_SECRET = re.compile(r"KEY|TOKEN|SECRET|PASSW", re.IGNORECASE)
_SECRET_LETTERS, _QUERY_LETTERS = 8, 4  # shorter values also occur in ordinary words
_ANSWER_BYTES_AT_MOST, _LOOK_EVERY_S = 1 << 16, 0.05
_START = (
    "import sys; sys.path.append(sys.argv[1]); "
    "from unisono.runtime.checkpoint.remote_process import main; main()"
)
_processes: dict[str, subprocess.Popen[bytes]] = {}  # by local folder


def url_of(directory: str | os.PathLike[str]) -> str:
    """Return the run directory if it is a URL; an empty string if it is a folder."""
    text = os.fspath(directory)
    if _URL.match(text) and "://" not in text:
        raise ValueError(f"`directory` must be a text if it is a URL, but is a path: {shown(text)}")
    return text if _URL.match(text) else ""


def refuse_url(directory: str | os.PathLike[str]) -> None:
    """Raise a ValueError if a path to read is a URL."""
    if url := url_of(directory):
        raise ValueError(
            f"what is read here must be a folder or a file, but {masked(url)} is a URL: pass "
            f"{local_folder(url)} if the run was on this machine, or copy it first."
        )


def masked(text: str, url: str = "") -> str:
    """Replace the secrets in a text: those of its URLs, of `url` and of the environment."""
    parts = urlsplit(url)
    secrets = [value for _, value in parse_qsl(parts.query) if len(value) >= _QUERY_LETTERS]
    secrets += [parts.password or "", unquote(parts.password or "")]
    known = [value for name, value in os.environ.items() if _SECRET.search(name)]
    text = _without_secrets(text)
    for secret in filter(None, secrets + [one for one in known if len(one) >= _SECRET_LETTERS]):
        text = text.replace(secret, "***")
    return text


def _without_secrets(text: str) -> str:
    """Remove passwords and queries from the URLs in a text."""
    return re.sub(r"(://[^\s?#]*)[?#]\S*", r"\1", re.sub(r"(://[^\s/:]*):[^\s/]*@", r"\1@", text))


def local_folder(url: str) -> Path:
    """Return the local copy's folder for a URL, inside the user's cache directory."""
    cache, place = os.environ.get("XDG_CACHE_HOME", ""), _without_secrets(url).rstrip("/")
    root = Path(cache if os.path.isabs(cache) else os.path.expanduser("~/.cache"))
    name = re.sub(r"[^\w.-]", "-", place.rpartition("/")[2], flags=re.ASCII)[:60]
    return root / "unisono" / f"{name}-{hashlib.sha256(place.encode()).hexdigest()[:16]}"


def start_copying(folder: str, work: Mapping[str, Any]) -> None:
    """Start the copying process of a folder, replacing a process that it may have.

    This process waits for it at exit unless :func:`finish_copying` has done so before.
    """
    if (before := _processes.pop(folder, None)) is not None:
        _end(before)
    with signals_held_back():
        process = _processes[folder] = subprocess.Popen(
            [sys.executable, "-P", "-c", _START, str(Path(__file__).resolve().parents[3])],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C is for the program
            env={**os.environ, **OUTLIVES},
        )
    assert process.stdin is not None, "a pipe"
    # In the environment, all processes could read it.
    process.stdin.write(json.dumps({**work, "folder": folder, "pid": os.getpid()}).encode() + b"\n")
    process.stdin.flush()


def finish_copying(
    folders: Collection[str] | None = None, is_enough: Callable[[], bool] = lambda: False
) -> None:
    """Wait until these local folders, or all, are copied, or until `is_enough` returns True.

    The copying process reports what is missing when UNISONO_REMOTE_TIMEOUT is over.
    """
    ours = [_processes.pop(one) for one in list(_processes) if folders is None or one in folders]
    for process in ours:
        assert process.stdin is not None, "a pipe"
        with suppress(OSError):  # the process has ended
            process.stdin.write(b"\n")  # a fork of this process may keep the pipe open
            process.stdin.close()
    until_s = time.monotonic() + (REMOTE.in_s() + GRACE_S if ours else 0)
    for process in ours:
        try:
            while process.poll() is None and not is_enough():
                if time.monotonic() > until_s:
                    say("the process that copies `directory` hangs: what is there may be old")
                    break
                time.sleep(_LOOK_EVERY_S)
        finally:
            _end(process)


def _end(process: subprocess.Popen[bytes]) -> None:
    """Kill a copying process: partial copies do not count."""
    process.kill()
    process.wait()
    assert process.stdin is not None, "a pipe"
    with suppress(OSError):
        process.stdin.close()


atexit.register(finish_copying)
os.register_at_fork(after_in_child=_processes.clear)


def refusal(url: str, trouble: str) -> str:
    """Return the error message for a URL that a run cannot start with."""
    return (
        f"`directory` must be a URL that can be read and written when a run begins, but "
        f"{masked(url)} {trouble}: set it right, or pass another `directory`."
    )


def answer_path(folder: Path, session: str) -> Path:
    """Return the file in which the copying process reports that the folder is up to date."""
    return folder / f".remote-{session}.json"


def await_answer(folder: Path, work: Mapping[str, Any]) -> None:
    """Wait until a folder is up to date with its URL, or raise a CheckpointError."""
    path = answer_path(folder, work["session"])

    def look(waited_s: float) -> str:
        try:
            with os.fdopen(open_plain(path, os.O_RDONLY), "rb") as file:
                return str(json.loads(file.read(_ANSWER_BYTES_AT_MOST)))
        except FileNotFoundError:
            raise NotThereError(str(path)) from None

    late = CheckpointError(refusal(work["url"], "does not answer"))
    error = wait_for(look, REMOTE.in_s() + LEASE_S + GRACE_S, lambda _: late)
    path.unlink()
    if error:
        raise CheckpointError(error)
