"""What does a run cost beside its steps? ``python -m bench.costs``, or ``make bench-costs``.

Memory, start, resume, end, long data sets, evaluation, each beside what plain torch or DDP takes in
the same sitting, with the aim. Memory is the proportional set size (PSS) of all processes of a side
together, looked at twenty times a second: pages that several processes share count once.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil
from rich.console import Console

from bench import machine
from bench.processes import REPOSITORY, SideFailedError, environment, measure, unisono_run
from bench.startup import MARK

PROGRAMS = str(REPOSITORY / "bench" / "costs_programs.py")
FIRST_STEP = str(REPOSITORY / "bench" / "first_step.py")
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
LOOK_EVERY_S = 0.05
TIMEOUT_S = 600.0


@dataclass(frozen=True)
class Figure:
    """One line of the table."""

    what: str
    value: float
    beside: float | None  # the same of plain torch or DDP
    aim: float
    is_rate: bool = False  # more is better

    @property
    def is_met(self) -> bool:
        return self.value >= self.aim if self.is_rate else self.value <= self.aim

    def __str__(self) -> str:
        beside = "" if self.beside is None else f"beside {self.beside:8.2f}  "
        sign = "≥" if self.is_rate else "≤"
        met = "met" if self.is_met else "MISSED"
        return f"{self.what:64} {self.value:8.2f}  {beside:17}  aim {sign} {self.aim:8.2f}  {met}"


@dataclass(frozen=True)
class Seen:
    """What one command took."""

    peak_gb: float
    costs: dict[str, float]  # what it has said itself
    first_step_s: float  # to the last worker's first step, for programs that say it


@contextmanager
def peak_memory() -> Iterator[list[float]]:
    """Note the most memory, in GB, that all children of this process have together."""
    peak, is_over = [0.0], threading.Event()

    def look() -> None:
        own = psutil.Process()
        while not is_over.wait(LOOK_EVERY_S):
            total = sum(pss_kb(child.pid) for child in own.children(recursive=True))
            peak[0] = max(peak[0], total * 1024 / 1e9)

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield peak
    finally:
        is_over.set()
        thread.join()


def pss_kb(pid: int) -> int:
    """Read a process's proportional set size; 0 of one that has ended."""
    with suppress(OSError):
        text = Path(f"/proc/{pid}/smaps_rollup").read_text()
        return int(text.partition("Pss:")[2].split()[0])
    return 0


def run(command: list[str], threads: int | None = 1) -> Seen:
    """Run one command and see what it takes."""
    start_s = time.time()
    with peak_memory() as peak:
        done = subprocess.run(
            command,
            env=environment(threads, GLOO_SOCKET_IFNAME="lo"),
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
        )
    if done.returncode:
        last_lines = "\n".join((done.stdout + done.stderr).splitlines()[-15:])
        raise SideFailedError(f"{' '.join(command)} ended with {done.returncode}:\n{last_lines}")
    costs = {name: float(number) for name, number in re.findall(r"cost (\w+) (\S+)", done.stdout)}
    ends_s = [float(seconds) for seconds in re.findall(rf"{MARK} ([\d.]+)", done.stdout)]
    return Seen(peak[0], costs, max(ends_s, default=start_s) - start_s)


def program(what: str, side: str, folder: Path | str = "-") -> list[str]:
    return [PROGRAMS, what, side, str(folder)]


def plainly(what: str, side: str, folder: Path | str = "-") -> Seen:
    return run([sys.executable, *program(what, side, folder)])


def on_two(what: str, side: str, folder: Path | str = "-") -> Seen:
    return run([*unisono_run(2), *program(what, side, folder)])


def training() -> Iterator[Figure]:
    """Memory of an MLP of 21 million parameters with Adam, S as many as workers."""

    def peak_gb(side: str, workers: int) -> float:
        with peak_memory() as peak:
            measure(side, "mlp", num_workers=workers, warmup_steps=3, timed_steps=8, data=Path("-"))
        return peak[0]

    ddp_gb, plain_gb = peak_gb("ddp", 2), peak_gb("plain", 1)
    for side, what in (
        ("unisono", "MLP 21 M, Adam, two workers: peak, GB"),
        ("unisono-fused-staged", "the same, staged"),
        ("unisono-fused-gloo", "the same, gloo"),
    ):
        yield Figure(what, peak_gb(side, 2), ddp_gb, ddp_gb)
    one, alone = "the same, one worker under `unisono run`", "the same, `python train.py`"
    yield Figure(one, peak_gb("unisono", 1), plain_gb, 1.2 * plain_gb)
    yield Figure(alone, peak_gb("unisono-alone", 1), plain_gb, 1.05 * plain_gb)


def data() -> Iterator[Figure]:
    """Data of a gigabyte for two workers."""
    made_gb = plainly("launched", "made").peak_gb
    handed = "1 GB handed to `unisono.launch`: peak, GB"
    yield Figure(handed, plainly("launched", "unisono").peak_gb, made_gb, 1.3)
    yield Figure("`unisono.share` of 1 GB: peak, GB", on_two("shared", "-").peak_gb, made_gb, 1.2)


def state() -> Iterator[Figure]:
    """A gigabyte of state: the end of a run, and its resumption."""
    with tempfile.TemporaryDirectory(prefix="unisono-bench-") as name:
        folder = Path(name)
        plain_end = plainly("large_state", "plain", folder)
        plain = plainly("large_state", "plain", folder)
        end = on_two("large_state", "unisono", folder)
        resumed = on_two("large_state", "unisono", folder)
    saved_s, loaded_s = plain_end.costs["end_s"], plain.costs["loaded_s"]
    yield Figure("1 GB of state: training, peak, GB", end.peak_gb, plain_end.peak_gb, end.peak_gb)
    yield Figure("the same, resumed", resumed.peak_gb, plain.peak_gb, 1.2 * end.peak_gb)
    what = "the same: resume until the first step, s"
    yield Figure(what, resumed.costs["loaded_s"], loaded_s, 2 * loaded_s)
    yield Figure("the same: last step to the end, s", end.costs["end_s"], saved_s, 1.2 * saved_s)


def samples() -> Iterator[Figure]:
    """A data set of 10⁸ samples."""
    for side, what in (("alone", ""), ("loaders", ", two loader processes a worker")):
        seen = on_two("many_samples", side)
        yield Figure(f"10⁸ samples{what}: first step, s", seen.costs["first_step_s"], None, 3.0)
        # Two workers with torch take 0.4 to 0.5 GB; the aim is what comes on top.
        small_gb = on_two("few_samples", side).peak_gb
        yield Figure(f"10⁸ samples{what}: more memory, GB", seen.peak_gb - small_gb, None, 0.4)


def evaluation() -> Iterator[Figure]:
    """Thousands of samples a second of processor time, batches of 64."""
    plain = plainly("sweeps", "plain").costs
    for shards in (1, 8):
        own = plainly("sweeps", str(shards)).costs
        for name in ("evaluate", "predict"):
            key = f"{name}_k"
            what = f"`{name}`, S = {shards}: thousand samples a CPU second"
            yield Figure(what, own[key], plain[key], 0.9 * plain[key], is_rate=True)


def loops() -> Iterator[Figure]:
    """Programs of many short loops: what a loop of five steps costs beyond its steps."""
    for way, aim_ms in (("", 1.0), (" fit", 3.0)):
        for net, size in (("small", "12 k"), ("large", "0.8 M")):
            for workers, ways in (("one worker", plainly), ("two workers", on_two)):
                what = f"a short{way or ' loop'}, {size} parameters, {workers}: ms beyond its steps"
                yield Figure(what, ways("loops", net + way).costs["loop_ms"], None, aim_ms)


def small() -> Iterator[Figure]:
    """Costs of a shard, of an event file, of the start."""
    yield Figure(
        "a shard of a tiny model: ms beside its passes",
        plainly("shard", "-").costs["shard_ms"],
        None,
        0.15,
    )
    with tempfile.TemporaryDirectory(prefix="unisono-bench-") as folder:
        events_s = plainly("events", "-", folder).costs["events_s"]
    yield Figure("reading an event file of 200,000 steps: CPU seconds", events_s, None, 3.0)
    ways: dict[str, Callable[[], Seen]] = {
        "unisono": lambda: run([*unisono_run(2), FIRST_STEP]),
        "torchrun": lambda: run([*TORCHRUN, *program("first_step", "-")]),
    }
    times_s = {name: [way().first_step_s for _ in range(4)][1:] for name, way in ways.items()}
    own_s, other_s = (statistics.median(times_s[name]) for name in ("unisono", "torchrun"))
    yield Figure("import and first step, two workers, s", own_s, other_s, 0.8 * other_s)


GROUPS = {one.__name__: one for one in (training, data, state, samples, evaluation, loops, small)}


def main() -> int:
    """Measure, print each line as it comes, write; the exit status is 1 if a side has failed."""
    parser = argparse.ArgumentParser(prog="python -m bench.costs", description=__doc__)
    parser.add_argument("--only", nargs="*", choices=GROUPS, default=list(GROUPS))
    parser.add_argument("--json", type=Path, metavar="PATH", help="where all figures are written")
    args = parser.parse_args()
    console = Console(width=None if os.isatty(1) else 150)
    facts, others = machine.facts(), machine.Others()
    figures: list[Figure] = []
    failures: list[str] = []
    for name in args.only:
        try:
            for figure in GROUPS[name]():
                figures.append(figure)
                console.print(str(figure), highlight=False, markup=False, soft_wrap=True)
        except SideFailedError as error:
            failures.append(f"{name}: {error}")
            console.print("failed", failures[-1], highlight=False, markup=False, soft_wrap=True)
    met = sum(figure.is_met for figure in figures)
    console.print(f"{met} of {len(figures)} aims are met. {others}", highlight=False)
    if args.json:
        content = {"machine": facts, "figures": [asdict(one) for one in figures]}
        args.json.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n")
    return 1 if failures else 0


if __name__ == "__main__":
    raise SystemExit(main())
