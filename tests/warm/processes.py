"""Starting programs as a user does, without the seconds in which torch is loaded.

``start`` and ``run`` are `subprocess.Popen` and `subprocess.run` of a command of this interpreter,
whose process is a fork of one that has loaded torch (``__main__``). Where the start itself is what
a test looks at, it uses `subprocess`.
"""

from __future__ import annotations

import atexit
import functools
import json
import os
import select
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from unisono.runtime.launch.forkserver import _OVERRIDES

REPOSITORY = Path(__file__).parents[2]
_END_AT_MOST_S = 10.0


class start(subprocess.Popen):  # type: ignore[type-arg]
    """`subprocess.Popen` of ``[sys.executable, …]``: a script, ``-m`` and a module, or ``-c``."""

    def _execute_child(self, args: Any, *rest: Any) -> None:
        """Replace what forks and executes."""
        _, _, _, pass_fds, cwd, env, _, _, _, *pipes = rest[:15]
        stdin, _, _, stdout, _, stderr = pipes
        start_new_session = rest[20]
        assert args[0] == sys.executable
        assert not pass_fds
        given = [fd if fd != -1 else own for own, fd in enumerate((stdin, stdout, stderr))]
        request = {
            "arguments": list(map(str, args[1:])),
            "environ": dict(os.environ if env is None else env),
            "folder": str(cwd or os.getcwd()),
            "session": start_new_session,
        }
        try:
            self.pid = _warm().ask(request, given)["pid"]
            self._child_created = True
        finally:
            self._close_pipe_fds(*pipes)

    def _try_wait(self, wait_flags: int) -> tuple[int, int]:
        """Replace `os.waitpid`, as the process is a child of another."""
        if not wait_flags & os.WNOHANG:
            fd = os.pidfd_open(self.pid)
            poll = select.poll()
            poll.register(fd, select.POLLIN)
            poll.poll()
            os.close(fd)
        pid, status = _warm().ask({"reap": self.pid})["reaped"]
        return pid, status

    def _internal_poll(self, *_: Any, **__: Any) -> int | None:
        if self.returncode is None and self._child_created:
            pid, status = self._try_wait(os.WNOHANG)
            if pid == self.pid:
                self._handle_exitstatus(status)
        return self.returncode


def run(
    command: Sequence[object],
    *,
    popen: Any = start,
    timeout: float = 60,
    check: bool = False,
    **options: Any,
) -> subprocess.CompletedProcess[str]:
    """Run a command of this interpreter to its end; returns what it printed, as text."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with popen(command, text=True, **{**pipes, **options}) as process:
        try:
            out, err = process.communicate(timeout=timeout)
        except BaseException:
            process.kill()
            raise
    done = subprocess.CompletedProcess(command, process.returncode, out, err)
    if check:
        done.check_returncode()
    return done


class _Warm:
    """The process that has loaded torch, and the way to it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.warm", str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                env={**os.environ, **_OVERRIDES},
                cwd=REPOSITORY,
            )
        atexit.register(self._close)

    def ask(self, request: dict[str, Any], fds: Sequence[int] = ()) -> dict[str, Any]:
        with self._lock:  # a test may start programs from threads, and wait for others
            socket.send_fds(self._channel, [json.dumps(request).encode()], fds)
            said: dict[str, Any] = json.loads(self._channel.recv(1 << 16))
        return said

    def _close(self) -> None:
        self._channel.close()
        try:
            self._process.wait(_END_AT_MOST_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


_ONE = threading.Lock()  # a cache calls as often as threads ask at once, and a test may start eight


def _warm() -> _Warm:
    with _ONE:
        return _the_only()


@functools.cache
def _the_only() -> _Warm:
    return _Warm()
