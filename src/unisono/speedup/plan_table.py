"""What `unisono plan` tells, in a terminal and as JSON."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

from unisono.quantities import duration, percent, size
from unisono.speedup.efficiency import OnHosts, efficiencies
from unisono.speedup.measured_steps import Measured

_HEADS = (
    "workers", "ms a step", "turns differ", "samples/s", "an epoch", "speed-up", "efficiency"
)  # fmt: skip
_LEFT_OUT = (
    "Nothing of this was run. Gradients that leave during the last backward pass make a step "
    "shorter; latency, what sending costs cores, and the slowest of more workers make it longer."
)


@dataclass(frozen=True, slots=True)
class PlanAnswer:
    """All that `unisono plan` tells."""

    program: str  # the script
    measured: Measured
    most_asked: int  # on how many workers it was to be measured
    on_hosts: OnHosts | None  # None: nobody has asked for several hosts

    @property
    def as_json(self) -> dict[str, Any]:
        """The same as plain JSON; times in seconds, sizes in bytes."""
        rows = efficiencies(self.measured)
        return {
            "program": self.program,
            **asdict(self.measured),
            "rows": [asdict(row) for row in rows],
            "limit": rows[-1].limit,
            "notes": list(self._notes()),
            "on_hosts": None if self.on_hosts is None else asdict(self.on_hosts),
        }

    def print(self, console: Console) -> None:
        """Print it."""
        table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
        for head in _HEADS:
            table.add_column(head, justify="right", no_wrap=True)
        rows = efficiencies(self.measured)
        for row in rows:
            table.add_row(
                f"{row.num_workers:,}",
                _ms(row.step_s),
                percent(row.turns_differ),
                f"{row.samples_per_second:,.4g}",
                duration(row.epoch_s),
                f"{row.speed_up:.2f}",
                percent(row.efficiency),
            )
        console.print(table, "")
        for line in (rows[-1].limit, *self._notes(), *self._formula()):
            console.print(line, highlight=False, markup=False)

    def _notes(self) -> Iterator[str]:
        measured, most = self.measured, self.measured.steps[-1].num_workers
        yield (
            f"Timed on {measured.device}: a batch of {measured.batch_size:,} in "
            f"{measured.num_shards:,} shards; without validation, checkpoints and starting up."
        )
        if self.most_asked > most:
            yield f"It ends at {most}: more workers need more `shards`, which give other results."

    def _formula(self) -> Iterator[str]:
        found = self.on_hosts
        if found is None:
            return
        hosts, each, rate = found.hosts, found.workers_per_host, found.bandwidth * 8 / 1e9
        gradients = size(self.measured.gradient_bytes)
        sent = f"({found.parts_of_host} + 1) · {hosts - 1}/{hosts} · {gradients} of gradients"
        yield f"\n{hosts} hosts like this one, {each} workers on each, by a formula, in ms a step:"
        for name, taken_s, inputs in (
            ("passes", found.passes_s, f"as timed, for {found.shards_of_worker} shards a worker"),
            ("links", found.links_s, f"{sent} at 94 % of {rate:,.4g} Gbit/s"),
            ("update", found.update_s, f"with sums and meetings, as timed on {each}"),
            ("together", found.step_s, f"{found.speed_up:.2f} times as fast as one worker"),
        ):
            yield f"  {name:9}{_ms(taken_s):>9}  {inputs}"
        yield _LEFT_OUT


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:,.4g}"
