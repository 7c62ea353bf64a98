"""What do fewer bytes over a slow link cost? ``python -m bench.slow_links``.

For each way of sending less, beside the exact exchange: the bytes that a host sends in a step,
counted at virtual links between two hosts, and the loss reached on MNIST and with a small GPT, on
two workers of one host that compute the two groups of two hosts. Counting takes root, as hosts are
made of namespaces; losses do not.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from tests.hosts.virtual_hosts import VirtualHosts, torchrun, why_not

from bench.workloads import DATA

PROGRAM = "bench/slow_link_program.py"
LOCAL_STEPS = 10
STEPS = {"mnist": 200, "gpt": 200}
COUNTED = (LOCAL_STEPS, 3 * LOCAL_STEPS)  # steps of two runs, whose bytes are compared
_TIMEOUT_S = 600


@dataclass(frozen=True, slots=True)
class Way:
    """One way of sending less.

    Attributes:
        name: in the table.
        how: what a program passes; empty: nothing.
    """

    name: str
    how: str = ""


WAYS = (
    Way("exact"),
    Way("Bf16Gradients()", "Bf16Gradients(groups=2)"),
    Way("PowerSGD(rank=8)", "PowerSGD(rank=8, start_step=20, groups=2)"),
    Way("PowerSGD(rank=2)", "PowerSGD(rank=2, start_step=20, groups=2)"),
    Way(
        f"DiLoCo(local_steps={LOCAL_STEPS})",
        f"DiLoCo(local_steps={LOCAL_STEPS}, groups=2)",
    ),
)


def result_in(text: str) -> dict[str, Any]:
    """Find what the program has printed; raises RuntimeError with all of it if it has failed."""
    found = re.search(r"^result (.*)$", text, re.MULTILINE)
    if found is None:
        raise RuntimeError(f"{PROGRAM} has failed:\n{text}")
    result: dict[str, Any] = json.loads(found[1])
    return result


def trained(model: str, way: Way, steps: int, seed: int, data: Path) -> dict[str, Any]:
    """Train and test on two workers of this host."""
    command = [sys.executable, "-m", "unisono", "run", "-n", "2", PROGRAM, model, "--test"]
    options = ["--how", way.how, "--steps", str(steps), "--seed", str(seed), "--data", str(data)]
    done = subprocess.run(
        [*command, *options],
        env={**os.environ, "PYTHONPATH": os.getcwd()},
        capture_output=True,
        text=True,
        check=False,
        timeout=_TIMEOUT_S,
    )
    return result_in(done.stdout + done.stderr)


def sent_a_step(model: str, way: Way, data: Path) -> float:
    """Count the most bytes that one of two hosts sends in a step, at the links between them."""
    how = way.how.replace("start_step=20", "start_step=0")
    counts = []
    for steps in COUNTED:
        with VirtualHosts(2) as hosts:
            options = ["--how", how, "--steps", str(steps), "--data", str(data)]
            runs = torchrun(hosts, [1, 1], [PROGRAM, model, *options])
            result_in("".join(run.communicate(timeout=_TIMEOUT_S)[0] for run in runs))
            counts.append([host.traffic().sent for host in hosts])
    less, more = counts
    return max(b - a for a, b in zip(less, more, strict=True)) / (COUNTED[1] - COUNTED[0])


def main() -> int:
    """Measure and print one table for each model."""
    parser = argparse.ArgumentParser(description="Compare the ways to send less between hosts.")
    parser.add_argument("--only", choices=STEPS, help="one model alone")
    parser.add_argument("--data", type=Path, default=DATA, metavar="FOLDER")
    parser.add_argument("--steps", type=int, help="of training, for each model")
    parser.add_argument("--seeds", type=int, default=1, help="how many runs of each")
    given = parser.parse_args()
    console, reason = Console(width=110), why_not()
    for model in [given.only] if given.only else STEPS:
        steps = given.steps or STEPS[model]
        table = Table("way", "bytes a step", "of exact", "test loss", "accuracy")
        exact = 0.0
        for way in WAYS:
            runs = [trained(model, way, steps, seed, given.data) for seed in range(given.seeds)]
            if not runs[0]["is_real"]:
                console.print(f"{model}: skipped, as its data are not in {given.data}")
                break
            num_bytes = runs[0]["gradient_bytes"]
            table.title = f"{model}, {steps} steps, gradients of {num_bytes:,} bytes"
            sent = 0.0 if reason else sent_a_step(model, way, given.data)
            exact = exact or sent
            counted = (f"{sent:,.0f}", f"{sent / exact:.3f}") if sent else ("not counted", "")
            table.add_row(way.name, *counted, _in_words(runs, "loss"), _in_words(runs, "accuracy"))
            console.print(f"{model} {way.name} done", style="dim", highlight=False)
        else:
            console.print(table)
    if reason:
        console.print(f"bytes are not counted: {reason}")
    return 0


def _in_words(runs: list[dict[str, Any]], name: str) -> str:
    values = [run[name] for run in runs]
    spread = f" ({min(values):.4f}–{max(values):.4f})" if len(values) > 1 else ""
    return f"{statistics.mean(values):.4f}{spread}"


if __name__ == "__main__":
    sys.exit(main())
