"""Runs a function in a process of its own, which may do what could not be undone."""

from __future__ import annotations

import faulthandler
import gc
import os
import signal
import sys
import traceback
import warnings
from collections.abc import Callable
from typing import NoReturn

import pytest
import torch

STACKS_AFTER_S = 60.0


def in_a_fork(function: Callable[[], object]) -> None:
    """Call a function in a forked process, and fail or skip here as it does there.

    What it returns is lost. The process is killed where this ends early.
    """
    reading, writing = os.pipe()
    sys.stdout.flush()
    sys.stderr.flush()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # that this process has threads
        pid = os.fork()
    if pid == 0:
        os.close(reading)
        _run_and_exit(function, writing)
    os.close(writing)
    status = 0
    try:
        with os.fdopen(reading, "rb") as answer:
            outcome, _, text = answer.read().decode(errors="replace").partition("\n")
        _, status = os.waitpid(pid, 0)
    except BaseException:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        raise
    if outcome == "skipped":
        pytest.skip(text)
    if outcome != "passed":
        pytest.fail(f"in a forked process: {text or f'it ended with {status}'}", pytrace=False)


def _run_and_exit(function: Callable[[], object], writing: int) -> NoReturn:
    faulthandler.dump_traceback_later(STACKS_AFTER_S, file=2)  # what pytest cannot see from there
    try:
        # A fork makes torch's pool of threads anew when it is asked for first. Autograd's threads,
        # one a device, ask at once, and one that comes in between ends the process (torch 2.13).
        torch.set_num_threads(torch.get_num_threads())
        # What tests before have left, such as a failed one's process group, is not for this process
        # to free: torch would join threads that are not here, and end the process.
        gc.freeze()
        function()
        said = "passed\n"
    except pytest.skip.Exception as skipped:
        said = f"skipped\n{skipped}"
    except BaseException:
        said = f"failed\n{traceback.format_exc()}"
    try:
        sys.stdout.flush()
        sys.stderr.flush()
        os.write(writing, said.encode())
    finally:
        os._exit(0)
