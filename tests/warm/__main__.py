"""Python with torch loaded, of which programs are forked: ``python -m tests.warm DESCRIPTOR``.

    test ──start──► this ──fork──► a script, or ``unisono run`` ──fork──► its fork server

Every test that starts a program would else wait four seconds until that, or its fork server, has
loaded torch. What a fork finds is what a new interpreter would: arguments, folder, variables,
``sys.path``, descriptors, signals. Invariant: one thread, so that forking is safe.
"""

from __future__ import annotations

import gc
import importlib
import itertools
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import threading
import types
from collections.abc import Sequence
from typing import Any, NoReturn

from tests import huge_pages

from unisono.runtime.launch import forkserver
from unisono.runtime.launch.forkserver import load

# What the command loads; not the command itself, which `python -m` is to find unloaded.
OF_THE_COMMAND = (
    "click",
    "rich._emoji_codes",
    "unisono.callbacks",
    "unisono.runtime.launch.api",
    "unisono.runtime.workers.external",
)
MAX_FD = 4096
# As in conftest.py: nothing here loads CUDA.
forkserver._READ_AT_LOAD = tuple(one for one in forkserver._READ_AT_LOAD if one != "CUDA_")
AT_LOAD = forkserver.read_at_load(os.environ)
FIRST_PATH = sys.path[1:]  # without the folder that `-m` has put there


def main(fd: int) -> None:
    """Fork what is asked for until nobody is there to ask; in a fork, be that."""
    channel = socket.socket(fileno=fd)
    for name in OF_THE_COMMAND:
        importlib.import_module(name)
    load()
    huge_pages.collapse()
    while True:
        message, fds, _, _ = socket.recv_fds(channel, 1 << 20, 3)
        if not message:
            return
        request = json.loads(message)
        if "reap" in request:
            said: dict[str, Any] = {"reaped": os.waitpid(request["reap"], os.WNOHANG)}
        else:
            said = {"pid": os.fork()}
            if not said["pid"]:
                break
            for given in fds:
                os.close(given)
        channel.send(json.dumps(said).encode())
    channel.detach()
    if "triton" in sys.modules:  # which, since torch 2.15, complains of what is not collected
        gc.unfreeze()
    _move_in(request, fds)
    forkserver.subprocess = _subprocess_that_forks()  # type: ignore[assignment]
    _be(request["arguments"])


def _move_in(request: dict[str, Any], fds: Sequence[int]) -> None:
    """Take over descriptors, variables and folder."""
    for standard, fd in enumerate(fds):
        os.dup2(fd, standard)
    os.closerange(3, MAX_FD)
    # The one there was believes that what it writes to can seek.
    sys.stdout = sys.__stdout__ = open(1, "w", closefd=False)  # noqa: SIM115
    if request["session"]:
        os.setsid()
    os.environ.clear()
    os.environ.update(request["environ"])
    os.chdir(request["folder"])
    sys.modules["numpy"].random.seed()


def _be(arguments: Sequence[str]) -> None:
    """Run ``SCRIPT …``, ``-m MODULE …`` or ``-c CODE …``; returns or raises as that does."""
    if arguments[0] == "-c":
        sys.argv[:] = ["-c", *arguments[2:]]
        sys.path[:] = ["", *FIRST_PATH]
        exec(arguments[1], {"__name__": "__main__"})
    elif arguments[0] == "-m":
        sys.argv[:] = list(arguments[1:])
        sys.path[:] = [os.getcwd(), *FIRST_PATH]
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv[:] = list(arguments)
        sys.path[:] = [os.path.dirname(os.path.realpath(arguments[0])), *FIRST_PATH]
        runpy.run_path(arguments[0], run_name="__main__")


class _Fork(subprocess.Popen):  # type: ignore[type-arg]
    """A fork server that is a fork of its launcher, which has loaded all that it would load."""

    def _execute_child(self, args: Any, *rest: Any) -> None:
        _, _, _, pass_fds, _, env = rest[:6]
        self.pid = os.fork()
        if not self.pid:
            _be_server(args[args.index("-c") :], pass_fds, env)
        self._child_created = True


def _be_server(arguments: Sequence[str], kept: Sequence[int], environ: dict[str, str]) -> NoReturn:
    try:
        signal.set_wakeup_fd(-1)
        for signum in (signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD):
            signal.signal(signum, signal.SIG_DFL)
        nothing = os.open(os.devnull, os.O_RDWR)
        os.dup2(nothing, 0)
        os.dup2(nothing, 1)
        for after, before in itertools.pairwise([2, *sorted(kept), MAX_FD]):
            os.closerange(after + 1, before)
        os.environ.clear()
        os.environ.update(environ)
        _be(arguments)
    finally:
        os._exit(70)


def _subprocess_that_forks() -> types.SimpleNamespace:
    def start(*args: Any, **options: Any) -> Any:
        fits = forkserver.read_at_load(options["env"]) == AT_LOAD
        can_fork = fits and threading.active_count() == 1
        return (_Fork if can_fork else subprocess.Popen)(*args, **options)

    return types.SimpleNamespace(**{**vars(subprocess), "Popen": start})


if __name__ == "__main__":
    main(int(sys.argv[1]))
