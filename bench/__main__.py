"""Compare Unisono with plain torch and DDP: ``python -m bench``, or ``make bench``.

The sides of a workload take turns (A B C … A B C …), so that whatever else the machine does meets
all of them; ratios are between medians of one sitting, and only those are worth quoting.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
from datetime import datetime
from pathlib import Path
from typing import Any

from rich.console import Console

from bench import machine
from bench.processes import SideFailedError, measure
from bench.recovery import TORCHRUN, UNISONO, Cost, Kill, measure_cost, measure_recovery
from bench.sides import SIDES
from bench.startup import LAUNCHED, PLAIN, measure_startup
from bench.table import (
    print_failure,
    print_kill,
    print_recovery,
    print_repeat,
    print_startup,
    print_verdicts,
    print_workload,
)
from bench.targets import (
    Repeat,
    Verdict,
    events_verdicts,
    rate_verdicts,
    recovery_verdict,
    startup_verdict,
)
from bench.workloads import DATA, WORKLOADS

RESULTS = Path(__file__).with_name("results")
STARTUP, RECOVERY = "startup", "recovery"
NAMES = [*WORKLOADS, STARTUP, RECOVERY]


def main() -> int:
    """Measure, print, write; the exit status is 1 if a side could not be measured."""
    args = parse()
    console = Console(width=None if os.isatty(1) else 130)
    facts, others = machine.facts(), machine.Others()
    console.print(
        f"{facts['cpu']}, {facts['cores']} cores, torch {facts['torch']}", highlight=False
    )
    repeats: list[Repeat] = []
    startup_s: dict[str, list[float]] = {PLAIN: [], LAUNCHED: []}
    kills: list[Kill] = []
    costs: list[Cost] = []
    failures: list[str] = []
    for name in args.only:
        if name == STARTUP:
            failures += run_startup(console, args, startup_s)
        elif name == RECOVERY:
            failures += run_recovery(console, args, kills, costs)
        else:
            failures += run_workload(console, args, name, repeats)
    verdicts = [*rate_verdicts(repeats), *events_verdicts(repeats)]
    if startup_s[LAUNCHED]:
        verdicts.append(startup_verdict(startup_s))
    if any(kill.way == UNISONO for kill in kills):
        verdicts.append(recovery_verdict(kills))
    print_verdicts(console, verdicts)
    if args.quick:
        console.print("A quick run shows that every side works; its figures mean little.")
    console.print(str(others), highlight=False, soft_wrap=True)
    facts["others_cores"] = others.cores()
    path = save(args, facts, repeats, startup_s, kills, costs, verdicts, failures)
    console.print(f"All repeats are in {path}", highlight=False, soft_wrap=True)
    return 1 if failures else 0


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    parser.add_argument(
        "--only",
        type=_names(NAMES),
        default=NAMES,
        metavar="NAMES",
        help=f"some of {','.join(NAMES)}",
    )
    parser.add_argument(
        "--sides", type=_names(list(SIDES)), default=list(SIDES), help=f"some of {','.join(SIDES)}"
    )
    parser.add_argument("--repeats", type=_count, help="of each side (3; quick: 1)")
    parser.add_argument("--workers", type=_count, default=2, help="of each side of several (2)")
    parser.add_argument("--quick", action="store_true", help="few steps, to see that it works")
    parser.add_argument(
        "--data", type=Path, default=DATA, help="folder with mnist/ and tinyshakespeare/"
    )
    parser.add_argument("--json", type=Path, metavar="PATH", help="where all repeats are written")
    args = parser.parse_args()
    args.repeats = args.repeats or (1 if args.quick else 3)
    return args


def run_workload(
    console: Console, args: argparse.Namespace, name: str, repeats: list[Repeat]
) -> list[str]:
    """Measure each side in turn; a side that fails once is left out and reported."""
    workload = WORKLOADS[name]
    divisor = 10 if args.quick else 1
    num_steps = max(workload.timed_steps // divisor, 2)
    sides = [side for side in args.sides if workload.sides is None or side in workload.sides]
    failures: dict[str, str] = {}
    for repeat in range(args.repeats):
        for side in (side for side in sides if side not in failures):
            # No spinner while it runs: its thread would take time from what is measured.
            try:
                seen = measure(
                    side,
                    name,
                    num_workers=args.workers,
                    warmup_steps=max(workload.warmup_steps // divisor, 2),
                    timed_steps=num_steps,
                    data=args.data.resolve(),
                )
            except SideFailedError as error:
                failures[side] = f"{name}, {side}: {error}"
                print_failure(console, failures[side])
                continue
            num_samples = num_steps * workload.batch_size * args.workers
            repeats.append(Repeat(name, side, repeat, num_steps, num_samples, **seen))
            print_repeat(console, repeats[-1], args.repeats)
    if len(failures) < len(sides):
        print_workload(console, name, repeats)
    return list(failures.values())


def run_startup(
    console: Console, args: argparse.Namespace, startup_s: dict[str, list[float]]
) -> list[str]:
    try:
        for way, _, seconds in measure_startup(args.workers, args.repeats):
            startup_s[way].append(seconds)
    except SideFailedError as error:
        print_failure(console, f"{STARTUP}: {error}")
        return [f"{STARTUP}: {error}"]
    print_startup(console, startup_s)
    return []


def run_recovery(
    console: Console, args: argparse.Namespace, kills: list[Kill], costs: list[Cost]
) -> list[str]:
    """Kill workers, then time steps that nobody disturbs; what fails does not stop the rest."""
    data = args.data.resolve()
    failures = []
    ways = (UNISONO, TORCHRUN) if any(side.startswith("ddp") for side in args.sides) else (UNISONO,)
    for way in ways:
        try:
            for kill in measure_recovery(way, args.workers, data, is_quick=args.quick):
                kills.append(kill)
                print_kill(console, kill)
        except SideFailedError as error:
            failures.append(f"{RECOVERY}: {error}")
            print_failure(console, failures[-1])
    try:
        costs.extend(measure_cost(args.workers, data, args.repeats, is_quick=args.quick))
    except SideFailedError as error:
        failures.append(f"{RECOVERY}, snapshots: {error}")
        print_failure(console, failures[-1])
    print_recovery(console, kills, costs)
    return failures


def save(
    args: argparse.Namespace,
    facts: dict[str, Any],
    repeats: list[Repeat],
    startup_s: dict[str, list[float]],
    kills: list[Kill],
    costs: list[Cost],
    verdicts: list[Verdict],
    failures: list[str],
) -> Path:
    """Write everything that was seen as JSON and return the path."""
    path = args.json or RESULTS / f"{datetime.now():%Y-%m-%d-%H%M%S}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    content = {
        "machine": facts,
        "workers": args.workers,
        "is_quick": args.quick,
        "targets": [verdict.as_json() for verdict in verdicts],
        "repeats": [repeat.as_json() for repeat in repeats],
        "startup_s": startup_s,
        "kills": [kill.as_json() for kill in kills],
        "snapshot_costs": [cost.as_json() for cost in costs],
        "failures": failures,
    }
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    return Path(path)


def _names(known: list[str]) -> Any:
    def parse_names(text: str) -> list[str]:
        names = [name.strip() for name in text.split(",")]
        for name in names:
            if name not in known:
                raise argparse.ArgumentTypeError(f"{name!r} is not one of {', '.join(known)}")
        return names

    return parse_names


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number of at least 1, but is {text!r}")
    return int(text)


if __name__ == "__main__":
    # As an exception, so that whoever started processes ends them.
    signal.signal(signal.SIGTERM, lambda signum, frame: sys.exit(128 + signum))
    raise SystemExit(main())
