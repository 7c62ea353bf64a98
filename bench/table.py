"""What does a reader see? One table per workload, then the promises with their figures."""

from __future__ import annotations

import statistics

from rich.console import Console
from rich.table import Table

from bench.sides import SIDES
from bench.startup import LAUNCHED, PLAIN
from bench.targets import Repeat, Verdict, median_rates
from bench.workloads import WORKLOADS

REFERENCES = {"ddp-tuned": "× DDP tuned", "ddp": "× DDP usual", "passes": "× passes alone"}


def print_repeat(console: Console, repeat: Repeat, num_repeats: int) -> None:
    """Print one line while the measuring goes on."""
    console.print(
        f"{repeat.repeat + 1}/{num_repeats} {repeat.workload:6} {repeat.side:14} "
        f"{repeat.ms_per_step:8.2f} ms/step",
        style="dim",
        highlight=False,
    )


def print_failure(console: Console, failure: str) -> None:
    """Print which side failed and the last lines it printed."""
    console.print("[red]failed[/]", end=" ")
    console.print(failure, markup=False, highlight=False, soft_wrap=True)


def print_workload(console: Console, workload: str, repeats: list[Repeat]) -> None:
    """Print medians with their range, and each side's rate over the three references."""
    own = [repeat for repeat in repeats if repeat.workload == workload]
    rates = median_rates(own, workload)
    data = "real data" if own and own[0].data == "real" else "random data of the same shape"
    table = Table(title=f"{WORKLOADS[workload].title} ({data})", title_justify="left")
    table.add_column("side", no_wrap=True)
    for heading in ("ms/step", "min … max", "samples/s", *REFERENCES.values()):
        table.add_column(heading, justify="right", no_wrap=True)
    for side in (name for name in SIDES if name in rates):
        times_ms = [repeat.ms_per_step for repeat in own if repeat.side == side]
        over = [
            f"{rates[side] / rates[reference]:.2f}" if reference in rates else "–"
            for reference in REFERENCES
        ]
        table.add_row(
            SIDES[side].title,
            f"{statistics.median(times_ms):.2f}",
            f"{min(times_ms):.2f} … {max(times_ms):.2f}",
            f"{rates[side]:,.0f}",
            *over,
        )
    console.print(table)


def print_startup(console: Console, seconds: dict[str, list[float]]) -> None:
    """Print the median time to the end of the first step, both ways."""
    table = Table(title="From Enter to the end of the first step", title_justify="left")
    table.add_column("started by", no_wrap=True)
    for heading in ("s", "min … max", "× python"):
        table.add_column(heading, justify="right", no_wrap=True)
    plain_s = statistics.median(seconds[PLAIN])
    for way in (PLAIN, LAUNCHED):
        times_s = seconds[way]
        median_s = statistics.median(times_s)
        table.add_row(
            way,
            f"{median_s:.2f}",
            f"{min(times_s):.2f} … {max(times_s):.2f}",
            f"{median_s / plain_s:.2f}",
        )
    console.print(table)


def print_verdicts(console: Console, verdicts: list[Verdict]) -> None:
    """Print each promise, the figure, and whether it was kept."""
    for verdict in verdicts:
        word = "[green]met   [/]" if verdict.is_met else "[red]missed[/]"
        console.print(
            f"{word} {verdict.seen:5.2f}  {verdict.promise}", highlight=False, soft_wrap=True
        )
