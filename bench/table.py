"""What does a reader see? One table per workload, then the promises with their figures."""

from __future__ import annotations

import statistics

from rich.console import Console
from rich.table import Table

from bench.recovery import NO_SNAPSHOTS, SNAPSHOTS, TORCHRUN, UNISONO, WORKLOAD, Cost, Kill
from bench.sides import SIDES
from bench.startup import LAUNCHED, PLAIN
from bench.targets import Repeat, Verdict, median_rates
from bench.workloads import WORKLOADS

REFERENCES = {"ddp-tuned": "× DDP tuned", "ddp": "× DDP usual", "passes": "× passes alone"}


def print_repeat(console: Console, repeat: Repeat, num_repeats: int) -> None:
    """Print one line while the measuring goes on."""
    console.print(
        f"{repeat.repeat + 1}/{num_repeats} {repeat.workload:10} {repeat.side:20} "
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


def print_kill(console: Console, kill: Kill) -> None:
    """Print one line while the measuring goes on."""
    console.print(
        f"{kill.way:14} rank {kill.rank} killed {kill.to_committed_s:8.3f} s",
        style="dim",
        highlight=False,
    )


def print_recovery(console: Console, kills: list[Kill], costs: list[Cost]) -> None:
    """Print what a kill costs either way, then what it costs to be ready for one."""
    title = f"From SIGKILL to the next committed step: {WORKLOADS[WORKLOAD].title}"
    table = Table(title=title, title_justify="left")
    table.add_column("started by", no_wrap=True)
    for heading in ("kills", "s", "min … max", "to any new step", "ms/step undisturbed"):
        table.add_column(heading, justify="right", no_wrap=True)
    for way in (UNISONO, TORCHRUN):
        own = [kill for kill in kills if kill.way == way]
        if own:
            times_s = [kill.to_committed_s for kill in own]
            table.add_row(
                way,
                str(len(own)),
                f"{statistics.median(times_s):.3f}",
                f"{min(times_s):.3f} … {max(times_s):.3f}",
                f"{statistics.median(kill.to_next_s for kill in own):.3f}",
                f"{1000 * statistics.median(kill.step_s for kill in own):.2f}",
            )
    console.print(table)
    table = Table(title="Undisturbed steps, with snapshots and without", title_justify="left")
    table.add_column("unisono run", no_wrap=True)
    for heading in ("ms/step, median", "min … max", "ms/step, mean", "min … max"):
        table.add_column(heading, justify="right", no_wrap=True)
    for way in (SNAPSHOTS, NO_SNAPSHOTS):
        own_costs = [cost for cost in costs if cost.way == way]
        cells = []
        for times_s in ([c.median_s for c in own_costs], [c.mean_s for c in own_costs]):
            times_ms = [1000 * seconds for seconds in times_s]
            if times_ms:
                cells.append(f"{statistics.median(times_ms):.2f}")
                cells.append(f"{min(times_ms):.2f} … {max(times_ms):.2f}")
        table.add_row(way, *cells)
    console.print(table)


def print_verdicts(console: Console, verdicts: list[Verdict]) -> None:
    """Print each promise, the figure, and whether it was kept."""
    for verdict in verdicts:
        word = "[green]met   [/]" if verdict.is_met else "[red]missed[/]"
        console.print(
            f"{word} {verdict.seen:6.3f}  {verdict.promise}", highlight=False, soft_wrap=True
        )
