"""What do the blocks amount to? A row for each side, and the promises that are judged."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from bench.gpu.clock import OFF, ON
from bench.gpu.networks import Gpt2
from bench.gpu.peaks import peak_flops
from bench.gpu.side_program import BARE, SIDES
from bench.gpu.turns import OWN, GpuBlock
from bench.gpu.workloads import GPT2, RESNET, SMALL, GpuWorkload
from bench.targets import Verdict

# Overhead of world size 1 over a bare loop with the same deterministic settings.
OVERHEAD_AT_MOST = {GPT2: 1.02, RESNET: 1.02, SMALL: 1.05}
DETERMINISTIC_AT_MOST = {GPT2: 1.05}
Row = dict[str, Any]


def rows_of(blocks: Iterable[GpuBlock], workload: GpuWorkload, device_name: str) -> list[Row]:
    """Sum the blocks of one workload up: medians, ranges, and ratios to the bare loop."""
    grouped: dict[tuple[str, str], list[GpuBlock]] = {}
    for block in blocks:
        if block.workload == workload.name:
            grouped.setdefault((block.side, block.setting), []).append(block)
    rows = [_row(own, workload) for own in grouped.values()]
    rows.sort(key=lambda row: (list(SIDES).index(row["side"]), row["setting"] != OFF))
    bare = {row["setting"]: row["ms"] for row in rows if row["side"] == BARE}
    flops, peak = flops_per_unit(workload), peak_flops(device_name)
    for row in rows:
        for setting in (OFF, ON):
            row[f"over_bare_{setting}"] = row["ms"] / bare[setting] if setting in bare else None
        row["mfu"] = row["units_per_s"] * flops / peak if flops and peak else None
    return rows


def _row(blocks: Sequence[GpuBlock], workload: GpuWorkload) -> Row:
    times_ms = [1000 * block.seconds / block.steps for block in blocks]
    per_step = workload.batch_size * workload.units_per_sample
    peaks = [block.peak_bytes for block in blocks if block.peak_bytes is not None]
    return {
        "workload": workload.name,
        "side": blocks[0].side,
        "setting": blocks[0].setting,
        "blocks": len(blocks),
        "steps_of_a_block": blocks[0].steps,
        "ms": statistics.median(times_ms),
        "ms_min": min(times_ms),
        "ms_max": max(times_ms),
        "unit": workload.unit,
        "units_per_s": 1000 * per_step / statistics.median(times_ms),
        "peak_bytes": max(peaks, default=None),
    }


def flops_per_unit(workload: GpuWorkload) -> float | None:
    """Count the operations for a token of GPT-2; the others print no share of the peak."""
    if workload.name != GPT2:
        return None
    with torch.device("meta"):  # its size is all that counts
        model = workload.build()
    assert isinstance(model, Gpt2)
    return model.flops_per_token()


def verdicts_of(rows: Sequence[Row]) -> list[Verdict]:
    """Judge what is promised of a GPU, as far as it was measured."""
    by_name = {(row["workload"], row["side"], row["setting"]): row for row in rows}
    found = []
    for workload, at_most in OVERHEAD_AT_MOST.items():
        row = by_name.get((workload, "unisono", OWN))
        if row is not None and row["over_bare_on"] is not None:
            promise = f"{workload}: Unisono ≤ {at_most} × bare loop with the same settings"
            found.append(Verdict(promise, row["over_bare_on"], row["over_bare_on"] <= at_most))
    for workload, at_most in DETERMINISTIC_AT_MOST.items():
        row = by_name.get((workload, BARE, ON))
        if row is not None and row["over_bare_off"] is not None:
            promise = f"{workload}: bare loop, deterministic ≤ {at_most} × default"
            found.append(Verdict(promise, row["over_bare_off"], row["over_bare_off"] <= at_most))
    return found


def print_rows(console: Console, workload: GpuWorkload, rows: Sequence[Row]) -> None:
    """Print the table of one workload."""
    table = Table(title=workload.title, title_justify="left")
    table.add_column("side", no_wrap=True)
    table.add_column("deterministic", no_wrap=True)
    headings = ["ms/step", "min … max", f"{workload.unit}/s", "× bare off", "× bare on"]
    has_mfu = any(row["mfu"] is not None for row in rows)
    for heading in [*headings, "peak MiB", *(["MFU"] if has_mfu else [])]:
        table.add_column(heading, justify="right", no_wrap=True)
    for row in rows:
        over = [row["over_bare_off"], row["over_bare_on"]]
        peak_mib = "–" if row["peak_bytes"] is None else f"{row['peak_bytes'] / 2**20:,.0f}"
        table.add_row(
            SIDES[row["side"]].title,
            row["setting"],
            f"{row['ms']:.3f}",
            f"{row['ms_min']:.3f} … {row['ms_max']:.3f}",
            f"{row['units_per_s']:,.0f}",
            *("–" if ratio is None else f"{ratio:.3f}" for ratio in over),
            peak_mib,
            *([f"{100 * row['mfu']:.1f} %"] if has_mfu else []),
        )
    console.print(table)
