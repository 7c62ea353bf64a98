"""Start the processes of one side, wait for them, bring back what rank 0 wrote.

Every measurement has fresh processes. None of them opens a socket beyond the loopback interface.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil

from bench.sides import SIDES

REPOSITORY = Path(__file__).resolve().parents[1]
TIMEOUT_S = 600.0


class SideFailedError(Exception):
    """A process of a side ended with an error or did not end at all."""


def unisono_run(num_workers: int) -> list[str]:
    """Return the command that people type, of the environment this Python belongs to.

    Where the package is on the path without being installed, there is no such command.
    """
    command = Path(sys.executable).with_name("unisono")
    start = [str(command)] if command.is_file() else [sys.executable, "-m", "unisono"]
    return [*start, "run", "-n", str(num_workers)]


def measure(
    side_name: str,
    workload_name: str,
    *,
    num_workers: int,
    warmup_steps: int,
    timed_steps: int,
    data: Path,
    timeout_s: float = TIMEOUT_S,
) -> dict[str, Any]:
    """Measure one side once.

    Returns:
        What rank 0 wrote: ``seconds`` of the timed steps, ``threads``, and whether the ``data``
        are real or random.

    Raises:
        SideFailedError: with the last lines that the process printed.
    """
    with tempfile.TemporaryDirectory(prefix="unisono-bench-") as folder:
        out = Path(folder, "result.json")
        program = [
            *(str(REPOSITORY / "bench" / "sides.py"), "--side", side_name),
            *("--workload", workload_name, "--workers", str(num_workers)),
            *("--warmup-steps", str(warmup_steps), "--timed-steps", str(timed_steps)),
            *("--data", str(data), "--out", str(out), "--scratch", folder),
        ]
        commands = _commands(side_name, program, num_workers)
        run_together(commands, Path(folder), timeout_s)
        if not out.is_file():
            raise SideFailedError(f"{side_name}: rank 0 ended without a result")
        result: dict[str, Any] = json.loads(out.read_text())
        return result


def environment(threads: int | None, **more: str) -> dict[str, str]:
    """Copy this process's environment without what would change threads or ranks."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if name not in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "UNISONO_THREADS", "RANK")
    }
    paths = [str(REPOSITORY), *filter(None, [os.environ.get("PYTHONPATH")])]
    kept["PYTHONPATH"] = os.pathsep.join(paths)
    if threads is not None:
        kept["OMP_NUM_THREADS"] = str(threads)
    return kept | more


def _commands(
    side_name: str, program: list[str], num_workers: int
) -> list[tuple[list[str], dict[str, str]]]:
    """List (command, environment) of each process to start."""
    side = SIDES[side_name]
    alone = environment(side.threads)
    if side.started_by == "unisono run":
        return [([*unisono_run(num_workers), *program], alone)]
    if side.started_by == "one process":
        return [([sys.executable, *program], alone)]
    ranks = [
        environment(
            side.threads,
            RANK=str(rank),
            WORLD_SIZE=str(num_workers),
            GLOO_SOCKET_IFNAME="lo",
        )
        for rank in range(num_workers)
    ]
    return [([sys.executable, *program], ranked) for ranked in ranks]


def run_together(
    commands: list[tuple[list[str], dict[str, str]]], folder: Path, timeout_s: float
) -> None:
    """Run all commands at once; when one fails or time is up, end them all.

    Raises:
        SideFailedError: with the last lines that the process printed.
    """
    logs = [folder / f"process-{index}.log" for index in range(len(commands))]
    processes = []
    with contextlib.ExitStack() as stack:
        for (command, env), log in zip(commands, logs, strict=True):
            output = stack.enter_context(log.open("wb"))
            process = subprocess.Popen(
                command, env=env, stdout=output, stderr=output, start_new_session=True
            )
            stack.callback(kill_all, process)
            processes.append(process)
        culprit = _wait(processes, timeout_s)
        status = None if culprit is None else processes[culprit].returncode
    if culprit is not None:
        last_lines = "\n".join(logs[culprit].read_text(errors="replace").splitlines()[-15:])
        what = f"was not done after {timeout_s:.0f} s" if status is None else f"ended with {status}"
        raise SideFailedError(f"process {culprit} {what}, last lines:\n{last_lines}")


def _wait(processes: list[subprocess.Popen[bytes]], timeout_s: float) -> int | None:
    """Wait until all ended well (None), or one failed or is late (its position)."""
    deadline_s = time.monotonic() + timeout_s
    while True:
        states = [process.poll() for process in processes]
        for index, state in enumerate(states):
            if state or (state is None and time.monotonic() > deadline_s):
                return index
        if None not in states:
            return None
        time.sleep(0.1)  # seldom: the cores belong to what is measured


def kill_all(process: subprocess.Popen[bytes]) -> None:
    """Kill what still runs of a process and its children, some of which lead their own session."""
    if process.poll() is None:
        process.send_signal(signal.SIGSTOP)  # so that it starts nobody new
        for child in psutil.Process(process.pid).children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    process.wait()
