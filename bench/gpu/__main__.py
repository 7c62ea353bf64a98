"""Measure a GPU: ``python -m bench.gpu``, or ``make bench-gpu``.

GPT-2, ResNet-50 and a small network, on a bare loop, Unisono, DDP with one rank, Accelerate,
Fabric and Lightning where they are installed, and torch's DataParallel and ours where there are two
GPUs: each with torch's deterministic settings off and on, all in turns. Then two workers that share
the GPU, and what a killed one costs.

``--device cpu --tiny`` shows on any machine that every side works; its figures mean nothing.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from rich.console import Console

from bench.gpu import find_package
from bench.gpu.figures import FAILURES, Figures
from bench.gpu.measuring import RECOVERY, Plan, measure_all
from bench.gpu.side_program import SIDES
from bench.gpu.turns import NOT_INSTALLED, TOO_FEW_GPUS
from bench.gpu.workloads import NAMES


def main() -> int:
    """Measure, print, write; the exit status is 1 if a side that is there has failed."""
    args = parser().parse_args()
    find_package()
    if reason := why_not(args.device):
        print(f"bench.gpu: {reason}", file=sys.stderr)
        return 2
    console = Console(width=None if os.isatty(1) else 130)
    figures = Figures(args.json, args.commit, args.device)
    measure_all(plan_of(args), figures, console)
    if args.tiny:
        console.print("A tiny run shows that every side works; its figures mean nothing.")
    console.print(f"All figures are in {figures.path}", highlight=False, soft_wrap=True)
    return 1 if failed(figures) else 0


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(prog="python -m bench.gpu", description=__doc__)
    add_arguments(made)
    made.add_argument("--seconds", type=float, default=300.0, help="for all of it (300)")
    return made


def add_arguments(made: argparse.ArgumentParser) -> None:
    """Add what a sitting takes, too."""
    names = [*NAMES, RECOVERY]
    made.add_argument("--device", default="cuda", choices=["cuda", "cpu"], help="(cuda)")
    made.add_argument("--tiny", action="store_true", help="small sizes, to see that it works")
    made.add_argument(
        "--only", type=_some_of(names), default=names, help=f"some of {','.join(names)}"
    )
    made.add_argument(
        "--sides", type=_some_of(list(SIDES)), default=list(SIDES), help=f"some of {list(SIDES)}"
    )
    made.add_argument("--block-s", type=float, default=0.6, help="of the bare loop's steps (0.6)")
    made.add_argument("--turns", type=int, default=7, help="of each side, at most (7)")
    made.add_argument("--json", type=Path, metavar="PATH", help="the file with all figures")
    made.add_argument("--commit", default="", help="what is measured, where there is no git")


def plan_of(args: argparse.Namespace) -> Plan:
    """Take the plan out of what was asked for."""
    return Plan(
        *(args.device, args.tiny, args.only, args.sides),
        seconds=args.seconds,
        block_s=0.02 if args.tiny else args.block_s,
        turns=min(args.turns, 2) if args.tiny else args.turns,
    )


def why_not(device: str) -> str | None:
    """Say why nothing can be measured on a device."""
    if device == "cuda" and not torch.cuda.is_available():
        return (
            "a GPU must be there that torch can use, but is not: run it where one is, or pass "
            "`--device cpu --tiny` to see that it works."
        )
    return None


def failed(figures: Figures) -> bool:
    """Tell whether anything has failed but for what is not installed, or not on so few GPUs."""
    left_out = (NOT_INSTALLED, TOO_FEW_GPUS)
    return any(not failure["how"].endswith(left_out) for failure in figures.content[FAILURES])


def _some_of(known: list[str]) -> Callable[[str], list[str]]:
    def read(text: str) -> list[str]:
        names = [name.strip() for name in text.split(",")]
        for name in names:
            if name not in known:
                raise argparse.ArgumentTypeError(f"{name!r} is not one of {', '.join(known)}")
        return names

    return read


if __name__ == "__main__":
    # As an exception, so that whoever started processes ends them.
    signal.signal(signal.SIGTERM, lambda signum, frame: sys.exit(128 + signum))
    raise SystemExit(main())
