"""How is the Python stack of another process read? py-spy reads its memory.

The process does nothing for it, is not stopped, and its interpreter lock does not matter: it may
compute in C, be stopped by a signal, or wait for a disk. Only to see in which C function one
computes it is held for a moment. Every look ends within a second or two,
and a failure is a word in the explanation, never an error.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import shutil
import signal
import subprocess
import sys
import sysconfig
import time
from collections.abc import Collection
from dataclasses import dataclass

from unisono.hangs.stacks import Stack, holder_stack, main_stack, native_place

TIMEOUT_S = 1.5
NATIVE_TIMEOUT_S = 3.0  # symbols of large libraries are read for it
_TRIES = 3  # a stack that changes while it is read may make no sense
_NOT_THERE = "py-spy is not installed: `pip install py-spy`"


@dataclass(frozen=True, slots=True)
class Sample:
    """A look at one process."""

    stack: Stack = ()  # of its first thread, the innermost frame first
    trouble: str = ""  # why there is none; else empty
    holder: Stack = ()  # of another thread, which holds Python's lock; empty if none does
    native: str = ""  # in which C function, of which library; empty where nobody has looked


def sample(pids: Collection[int], timeout_s: float = TIMEOUT_S) -> dict[int, Sample]:
    """Read the stacks of some processes, all at the same time.

    Args:
        pids: the processes.
        timeout_s: after how long those that have not been read are given up, in seconds.
    """
    program = find_sampler()
    if program is None:
        return {pid: Sample(trouble=_NOT_THERE) for pid in pids}
    until_s = time.monotonic() + timeout_s
    found = {pid: Sample(trouble="nobody has looked") for pid in pids}
    for _ in range(_TRIES):
        wanted = [pid for pid, one in found.items() if one.trouble]
        if wanted and time.monotonic() < until_s:
            found.update(_sample_once(program, wanted, until_s))
    return found


def native_places(pids: Collection[int], timeout_s: float = NATIVE_TIMEOUT_S) -> dict[int, str]:
    """Find out in which C functions some processes compute, as :func:`native_place` has it.

    Each is held for some milliseconds, so it must not wait in a call to the kernel, which that
    would end.
    """
    program = find_sampler()
    if program is None or not pids:
        return {}
    found = _sample_once(program, pids, time.monotonic() + timeout_s, is_native=True)
    return {pid: one.native for pid, one in found.items() if one.native}


@functools.cache
def find_sampler() -> str | None:
    """Find py-spy beside this Python, or on the path."""
    folders = [sysconfig.get_path("scripts"), os.path.dirname(sys.executable)]
    beside = shutil.which("py-spy", path=os.pathsep.join(folders))
    return beside or shutil.which("py-spy")


def _sample_once(
    program: str, pids: Collection[int], until_s: float, *, is_native: bool = False
) -> dict[int, Sample]:
    how = ["--native"] if is_native else ["--nonblocking", "--locals"]
    started: dict[int, subprocess.Popen[bytes]] = {}
    found: dict[int, Sample] = {}
    for pid in pids:
        arguments = ["dump", *how, "--json", "--pid", str(pid)]
        try:
            started[pid] = subprocess.Popen(
                [program, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,  # Ctrl-C is not for it
            )
        except OSError as error:
            found[pid] = Sample(trouble=f"py-spy cannot be started ({error.strerror})")
    for pid, process in started.items():
        found[pid] = _outcome(process, pid, until_s, is_native=is_native)
    return found


def _outcome(
    process: subprocess.Popen[bytes], pid: int, until_s: float, *, is_native: bool
) -> Sample:
    try:
        out, said = process.communicate(timeout=max(0.01, until_s - time.monotonic()))
    except subprocess.TimeoutExpired:
        process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.communicate(timeout=0.2)
        if is_native:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGCONT)  # it may just have been held
        return Sample(trouble="py-spy did not answer in time")
    if process.returncode:
        return Sample(trouble=_reason(said.decode(errors="replace")))
    try:
        dump = json.loads(out)
        native = native_place(dump, pid) if is_native else ""
        return Sample(main_stack(dump, pid), holder=holder_stack(dump, pid), native=native)
    except (ValueError, KeyError, TypeError):
        return Sample(trouble="what py-spy has written makes no sense")


def _reason(said: str) -> str:
    """Take the reason from what py-spy says, which is followed by a trace of its own stack."""
    said = said.partition("Stack backtrace")[0]
    if "ermission denied" in said or "not permitted" in said:
        return "the kernel does not let you read that process's memory: ask as root"
    first = said.strip().partition("\n")[0].removeprefix("Error: ")
    return f"py-spy says: {first or 'nothing'}"
