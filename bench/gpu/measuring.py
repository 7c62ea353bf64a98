"""What is measured, in which order, and for how long? The parts of ``make bench-gpu``."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from bench.gpu.figures import BLOCKS, FAILURES, KILLS, MACHINE, ROWS, TARGETS, Figures
from bench.gpu.summary import Row, print_rows, rows_of, verdicts_of
from bench.gpu.turns import GpuBlock, Turns, entries
from bench.gpu.workloads import GPT2, workload
from bench.processes import SideFailedError
from bench.recovery import UNISONO, Kill, measure_recovery
from bench.table import print_failure, print_verdicts
from bench.workloads import DATA

RECOVERY = "recovery"
RECOVERY_S = 45.0  # kept for it, of all that there is


@dataclass(frozen=True)
class Plan:
    """What ``make bench-gpu`` is asked for.

    Attributes:
        device: ``"cuda"`` or ``"cpu"``.
        tiny: whether workloads are so small that a CPU computes them in seconds.
        only: names of workloads, and :data:`RECOVERY`.
        sides: names of sides.
        seconds: the time for all of it.
        block_s: how long a block of steps of the bare loop takes.
        turns: how often each side computes a block, at most.
    """

    device: str
    tiny: bool
    only: Sequence[str]
    sides: Sequence[str]
    seconds: float
    block_s: float
    turns: int


def measure_all(plan: Plan, figures: Figures, console: Console) -> None:
    """Measure what is planned; whatever fails is written down, and the rest goes on."""
    end_s = time.monotonic() + plan.seconds
    names = [name for name in plan.only if name != RECOVERY]
    kept_s = RECOVERY_S if RECOVERY in plan.only else 0.0
    rows: list[Row] = []
    for number, name in enumerate(names):
        share_s = (end_s - kept_s - time.monotonic()) / (len(names) - number)
        rows += _measure_workload(plan, name, share_s, figures, console)
        figures.replace(ROWS, rows)
    if plan.device == "cuda" and not plan.tiny:
        verdicts = verdicts_of(rows)
        print_verdicts(console, verdicts)
        figures.replace(TARGETS, [verdict.as_json() for verdict in verdicts])
    if RECOVERY in plan.only:
        _measure_recovery(plan, figures, console, end_s)


def _measure_workload(
    plan: Plan, name: str, seconds: float, figures: Figures, console: Console
) -> list[Row]:
    chosen = workload(name, tiny=plan.tiny)
    start_s, blocks = time.monotonic(), []

    def fail(side: str, how: str) -> None:
        print_failure(console, f"{name}, {side}: {how}")
        figures.add(FAILURES, {"workload": name, "side": side, "how": how})

    rows_in_turn = entries(plan.sides, has_convolutions=name != GPT2)
    with (
        tempfile.TemporaryDirectory(prefix="unisono-bench-") as folder,
        Turns(name, plan.device, plan.sides, Path(folder), fail, tiny=plan.tiny) as turns,
    ):
        left_s = seconds - (time.monotonic() - start_s)
        for block in turns.measure(rows_in_turn, plan.block_s, left_s, plan.turns):
            blocks.append(block)
            figures.add(BLOCKS, block.as_json())
            if console.is_terminal:
                _print_block(console, block)
    rows = rows_of(blocks, chosen, figures.content[MACHINE]["device"])
    if rows:
        print_rows(console, chosen, rows)
    return rows


def _print_block(console: Console, block: GpuBlock) -> None:
    console.print(
        f"turn {block.turn + 1} {block.workload:9} {block.side:14} {block.setting:9} "
        f"{1000 * block.seconds / block.steps:9.3f} ms/step",
        style="dim",
        highlight=False,
    )


def _measure_recovery(plan: Plan, figures: Figures, console: Console, end_s: float) -> None:
    """Kill workers that share the device, and read off how long they held the other up."""
    flags = ("--workers-per-gpu", "2") if plan.device == "cuda" else ()
    kills: list[Kill] = []
    try:
        for kill in measure_recovery(
            UNISONO, 2, DATA, is_quick=plan.tiny, flags=flags, device=plan.device
        ):
            kills.append(kill)
            figures.add(KILLS, kill.as_json())
            console.print(
                f"recovery: rank {kill.rank} killed; the next committed step came after "
                f"{kill.to_committed_s:.3f} s, undisturbed steps take {1000 * kill.step_s:.2f} ms",
                highlight=False,
            )
            if time.monotonic() > end_s:
                return
    except SideFailedError as error:
        print_failure(console, f"{RECOVERY}: {error}")
        figures.add(FAILURES, {"workload": RECOVERY, "side": UNISONO, "how": str(error)})
