"""Does `unisono plan` foretell what is measured? ``python -m bench.forecast``, ten minutes.

In each round, for each workload: it is planned, then runs on one and on two workers, and, as root,
on two hosts with one worker each, made of network namespaces, whose links are shaped::

    plan │ 1 worker │ 2 workers │ 2 hosts: 0.1, 1, 10 Gbit/s ║ 1 worker │ … │ plan ║ plan │ …

Every other round ends with its plan, as a machine may be slower for minutes. Forecast and measured
are medians over rounds of a step's mean time. A case is met if the forecast is within the limit of
what was measured, or between the fastest and the slowest measured run.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from rich.console import Console
from rich.table import Table
from tests.hosts.virtual_hosts import Link, VirtualHosts, torchrun, why_not

from bench import machine
from bench.forecast_program import CASES, TOLD
from bench.processes import REPOSITORY, environment, unisono_run
from bench.workloads import DATA
from unisono.forecast.cluster import Cluster
from unisono.forecast.copying import copying_cost_s
from unisono.forecast.measured_steps import Measurement, measure_steps
from unisono.forecast.outlook import Expectation, Failures, expectations
from unisono.forecast.step_profile import StepProfile
from unisono.launch.job import SCRIPT
from unisono.verify.trials import Program

PROGRAM = str(REPOSITORY / "bench" / "forecast_program.py")
RATES = {"0.1gbit": 1.25e7, "1gbit": 1.25e8, "10gbit": 1.25e9}
ON_ONE_HOST, ON_HOSTS = 0.05, 0.10  # how far a forecast may be from what is measured
_STEPS_AT_LEAST = 6


@dataclass
class Row:
    """One case: what was forecast and what was measured, in seconds, a value a round.

    Attributes:
        name: the workload and where it runs.
        limit: by how much the forecast may be off.
        causes_s: of the last forecast.
    """

    name: str
    limit: float
    forecast_s: list[float] = field(default_factory=list)
    measured_s: list[float] = field(default_factory=list)
    causes_s: dict[str, float] = field(default_factory=dict)

    @property
    def ratio(self) -> float:
        """Forecast over measured, of the medians."""
        return statistics.median(self.forecast_s) / statistics.median(self.measured_s)

    @property
    def is_met(self) -> bool:
        """Whether the forecast is within the limit, or among the measured runs."""
        among = min(self.measured_s) <= statistics.median(self.forecast_s) <= max(self.measured_s)
        return abs(self.ratio - 1) <= self.limit or among


def main() -> int:
    """Forecast, measure, print; the exit status is 1 if a forecast is too far off."""
    parser = argparse.ArgumentParser(prog="python -m bench.forecast", description=__doc__)
    parser.add_argument("--only", default=",".join(CASES), help=f"some of {','.join(CASES)}")
    parser.add_argument("--rounds", type=int, default=3, help="at most, as far as time goes (3)")
    parser.add_argument("--minutes", type=float, default=9.5, help="no round begins beyond (9.5)")
    parser.add_argument("--seconds", type=float, default=2.0, help="of each measurement (2)")
    parser.add_argument("--data", type=Path, default=DATA, help="with mnist/, tinyshakespeare/")
    parser.add_argument("--causes", action="store_true", help="what forecasts consist of")
    args = parser.parse_args()
    args.data = args.data.resolve()
    console, others, begun_s = Console(width=110), machine.Others(), time.monotonic()
    rows: dict[str, Row] = {}
    for turn in range(args.rounds):
        spent_s = time.monotonic() - begun_s
        if turn and spent_s * (turn + 1) / turn > 60 * args.minutes:
            break
        for name in args.only.split(","):
            take_round(name, turn, args, rows)
            took = f"round {turn + 1}, {name}: {time.monotonic() - begun_s:.0f} s"
            console.print(took, style="dim", highlight=False)
    console.print(table(rows.values()))
    for row in rows.values() if args.causes else ():
        parts = (f"{cause} {s * 1e3:.2f}" for cause, s in row.causes_s.items() if abs(s) > 1e-5)
        console.print(f"{row.name}: {', '.join(parts)} ms", style="dim", highlight=False)
    if reason := why_not():
        console.print(f"Left out: two hosts, as {reason}.", soft_wrap=True)
    console.print(str(others), highlight=False, soft_wrap=True)
    missed = [row.name for row in rows.values() if not row.is_met]
    said = f"missed by {', '.join(missed)}" if missed else f"met by all {len(rows)} cases"
    console.print(f"Forecasts within their limits: {said}.", soft_wrap=True)
    return 1 if missed else 0


def take_round(name: str, turn: int, args: argparse.Namespace, rows: dict[str, Row]) -> None:
    """Plan a workload and run it; add what came of it to `rows`."""
    program, runs_first = [name, "--data", str(args.data)], turn % 2
    limits = {f"{name}, {workers}": ON_ONE_HOST for workers in ("1 worker", "2 workers")}
    limits |= {} if why_not() else {f"{name}, 2 hosts, {rate}": ON_HOSTS for rate in RATES}
    if runs_first:
        foretold_s = [rows[case].forecast_s[-1] for case in limits]
        times_s = measured(program, [steps_in(args.seconds, step_s) for step_s in foretold_s])
    foretold = list(forecast(program, args.seconds))[: len(limits)]
    if not runs_first:
        times_s = measured(program, [steps_in(args.seconds, one.step_s) for one in foretold])
    for (case, limit), one, step_s in zip(limits.items(), foretold, times_s, strict=True):
        row = rows.setdefault(case, Row(case, limit))
        row.forecast_s.append(one.step_s)
        row.measured_s.append(step_s)
        row.causes_s = one.causes_s


def measured(program: list[str], numbers: Sequence[int]) -> list[float]:
    """Run a program for so many steps on one worker, on two, and on hosts if it is to be."""
    on_workers, on_hosts = numbers[:2], list(numbers[2:])
    times_s = [on_one_host(at + 1, program, number) for at, number in enumerate(on_workers)]
    return times_s + (on_two_hosts(program, on_hosts) if on_hosts else [])


def steps_in(seconds: float, step_s: float) -> int:
    return max(_STEPS_AT_LEAST, math.ceil(seconds / step_s))


def forecast(program: list[str], seconds: float) -> Iterator[Expectation]:
    """Forecast as `unisono plan` does: one and two workers, then two hosts with each bandwidth."""
    with tempfile.TemporaryDirectory(prefix="unisono-bench-") as folder:
        asked = Program(SCRIPT, PROGRAM, tuple(program), Path(folder))
        environ = environment(1, UNISONO_THREADS="1")
        profile = measure_steps(
            Measurement(asked, seconds, 300.0, 1, environ, lambda line: None), 2
        ).profile
    cores, copied_s = len(os.sched_getaffinity(0)), copying_cost_s()
    yield from expectations(profile, [1, 2], Cluster(cores), Failures())
    for bandwidth in RATES.values():
        links = Cluster(cores=1, hosts=2, bandwidth=bandwidth, copying_s=copied_s)
        yield from expectations(on_one_machine(profile), [2], links, Failures())


def on_one_machine(profile: StepProfile) -> StepProfile:
    """Have one worker take as long as beside another one: these hosts share a machine.

    Passes as they were measured; the optimizer as two workers take for a half each, at once.
    """
    alone, together = profile.alone, profile.several
    passes = float(together.shard_s.mean() / alone.shard_s.mean())
    update = float(together.updating_s.mean() / alone.updating_s.mean()) * together.num_workers
    slower = replace(
        alone, own_s=alone.own_s * passes, updating_s=alone.updating_s * max(update, 1.0)
    )
    return replace(profile, alone=slower)


def on_one_host(num_workers: int, program: list[str], num_steps: int) -> float:
    """Run a program on this machine; give the seconds of a step."""
    command = [*unisono_run(num_workers), PROGRAM, *program, "--blocks", str(num_steps)]
    with tempfile.TemporaryDirectory(prefix="unisono-bench-") as folder:
        done = subprocess.run(
            command, cwd=folder, env=environment(1), capture_output=True, text=True, check=False
        )
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stderr[-2000:]}")
    return told(done.stdout)[0]


def on_two_hosts(program: list[str], num_steps: list[int]) -> list[float]:
    """Run a program on two hosts, with each bandwidth in turn; give the seconds of a step."""
    blocks = ["--blocks", ",".join(map(str, num_steps)), "--rates", ",".join(RATES)]
    with VirtualHosts(2, Link()) as hosts:
        said = []
        for process in torchrun(hosts, [1, 1], [PROGRAM, *program, *blocks]):
            assert process.stdout is not None
            said.append(process.stdout.read())
            if process.wait():
                raise SystemExit(f"two hosts failed:\n{said[-1][-2000:]}")
    return told("".join(said))


def told(output: str) -> list[float]:
    """Find what rank 0 has told of the blocks."""
    (line,) = (line for line in output.splitlines() if line.startswith(TOLD))
    return [float(step_s) for step_s in json.loads(line.removeprefix(TOLD))]


def table(rows: Iterable[Row]) -> Table:
    """Show each case: forecast, measured with its range, their ratio, and whether it is met."""
    shown = Table(title="A step, in ms: medians of the rounds (range)", title_justify="left")
    shown.add_column("case", no_wrap=True)
    for heading in ("forecast", "measured", "ratio", "within"):
        shown.add_column(heading, justify="right", no_wrap=True)
    for row in rows:
        verdict = f"{row.limit:.0%}" if abs(row.ratio - 1) <= row.limit else "the range"
        cells = [ranged(row.forecast_s), ranged(row.measured_s), f"{row.ratio:.3f}"]
        shown.add_row(row.name, *cells, verdict if row.is_met else f"[red]not {row.limit:.0%}[/]")
    return shown


def ranged(times_s: list[float]) -> str:
    low, middle, high = (f(times_s) * 1e3 for f in (min, statistics.median, max))
    return f"{middle:.2f} ({low:.2f} … {high:.2f})"


if __name__ == "__main__":
    sys.exit(main())
