"""Is this version as fast as another one? ``python -m bench.versions OLDER_PYTHON``.

Both versions take turns on one machine, A B B A A B …, so that whatever else the machine does meets
both. The benchmark is this checkout's; what differs is the Unisono that each interpreter imports.
Both must import one installation of torch: two of the same version have differed by 5 %.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from bench.startup import LAUNCHED

REPOSITORY = Path(__file__).resolve().parents[1]
SIDES = "unisono,unisono-fused"
OLDER, NEWER = "older", "newer"
Figures = dict[str, float]


def main() -> int:
    """Measure both versions in turns and print ratios of medians."""
    parser = argparse.ArgumentParser(prog="python -m bench.versions", description=__doc__)
    parser.add_argument("older", metavar="OLDER_PYTHON", help="the other version's interpreter")
    parser.add_argument("--turns", type=int, default=7, help="of each version (7)")
    parser.add_argument("--only", default="tiny,cnn8,cnn64,mlp,gpt,startup,recovery")
    parser.add_argument("--data", type=Path, help="folder with mnist/ and tinyshakespeare/")
    args = parser.parse_args()
    console = Console(width=110)
    seen: dict[str, dict[str, list[float]]] = {OLDER: {}, NEWER: {}}
    for turn in range(args.turns):
        for version in (OLDER, NEWER) if turn % 2 == 0 else (NEWER, OLDER):
            python = args.older if version == OLDER else sys.executable
            for name, figure in measure(python, args.only, args.data).items():
                seen[version].setdefault(name, []).append(figure)
        console.print(f"turn {turn + 1} of {args.turns}", style="dim", highlight=False)
        if turn + 1 >= min(3, args.turns):
            console.print(table(seen))
    return 0


def measure(python: str, only: str, data: Path | None) -> Figures:
    """Run the benchmark once with the Unisono of `python`; seconds or milliseconds by name."""
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        command = [python, "-m", "bench", "--only", only, "--sides", SIDES, "--repeats", "1"]
        command += ["--json", file.name, *(["--data", str(data.resolve())] if data else [])]
        subprocess.run(command, cwd=REPOSITORY, check=True, stdout=subprocess.DEVNULL)
        return dict(figures(json.loads(Path(file.name).read_text())))


def figures(found: dict[str, Any]) -> Iterator[tuple[str, float]]:
    """Take what is compared out of the benchmark's file."""
    for repeat in found["repeats"]:
        yield f"{repeat['workload']}, {repeat['side']} (ms a step)", repeat["ms_per_step"]
    if found["startup_s"][LAUNCHED]:
        yield "start to the first step (s)", statistics.median(found["startup_s"][LAUNCHED])
    if found["kills"]:
        times_s = [kill["to_committed_s"] for kill in found["kills"]]
        yield "recovery of a killed worker (s)", statistics.median(times_s)


def table(seen: dict[str, dict[str, list[float]]]) -> Table:
    """Show how many times as fast the newer version is: medians, and the fastest turn of each.

    Whatever else a machine does can only slow a turn down, so on a busy one the fastest turns tell
    more than the medians.
    """
    shown = Table(title="Two versions in turns", title_justify="left")
    shown.add_column("figure", no_wrap=True)
    for heading in ("older", "newer", "older / newer", "of single turns", "of fastest"):
        shown.add_column(heading, justify="right", no_wrap=True)
    for name, newer in seen[NEWER].items():
        older = seen[OLDER].get(name)
        if not older:
            continue
        ratios = sorted(a / b for a, b in zip(older, newer, strict=True))
        medians = statistics.median(older), statistics.median(newer)
        shown.add_row(
            name,
            *(f"{median:.3f}" for median in medians),
            f"{medians[0] / medians[1]:.3f}",
            f"{ratios[0]:.2f} … {ratios[-1]:.2f}",
            f"{min(older) / min(newer):.3f}",
        )
    return shown


if __name__ == "__main__":
    raise SystemExit(main())
