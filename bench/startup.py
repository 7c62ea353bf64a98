"""How long from Enter to the end of the first step, on plain python and under ``unisono run``?

Both start the same script; the parent reads the wall clock just before, the script just after its
first step. Of several workers the last one counts.
"""

from __future__ import annotations

import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from bench.processes import SideFailedError, environment, unisono_run

SCRIPT = Path(__file__).with_name("first_step.py")
PLAIN, LAUNCHED = "python", "unisono run"
MARK = "first step done at"  # what the script prints before the time
TIMEOUT_S = 120.0


def measure_startup(num_workers: int, repeats: int) -> Iterator[tuple[str, int, float]]:
    """Yield (way to start, repeat, seconds), both ways in turn.

    One start of each comes first and is not counted: it warms the disk's cache and, under
    ``unisono run``, whatever is kept between runs.
    """
    ways = {
        PLAIN: [sys.executable, str(SCRIPT)],
        LAUNCHED: [*unisono_run(num_workers), str(SCRIPT)],
    }
    expected = {PLAIN: 1, LAUNCHED: num_workers}
    for repeat in range(-1, repeats):
        for way, command in ways.items():
            seconds = _time_first_step(command, expected[way])
            if repeat >= 0:
                yield way, repeat, seconds


def _time_first_step(command: list[str], num_workers: int) -> float:
    start_s = time.time()
    done = subprocess.run(
        command, env=environment(None), capture_output=True, text=True, timeout=TIMEOUT_S
    )
    ends_s = [float(seconds) for seconds in re.findall(rf"{MARK} ([\d.]+)", done.stdout)]
    if done.returncode != 0 or len(ends_s) != num_workers:
        last_lines = "\n".join((done.stdout + done.stderr).splitlines()[-15:])
        raise SideFailedError(
            f"{' '.join(command)} printed {len(ends_s)} of {num_workers} times, "
            f"exit status {done.returncode}, last lines:\n{last_lines}"
        )
    return max(ends_s) - start_s
