"""One line a worker, in as many columns as a terminal has room for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any, Literal

from rich.table import Table
from rich.text import Text

from unisono.quantities import size
from unisono.report.events import PHASES
from unisono.report.status import USUAL, WorkerLine

BAR_WIDTH = 12
STYLES = ("cyan", "green", "blue", "red", "magenta", "yellow")  # of the phases
_STATE_STYLES = {"stopped": "yellow", "gone": "red", "lost": "red", "running": "green"}


@dataclass(frozen=True)
class Column:
    """One of the table."""

    head: str
    width: int  # in cells
    importance: int  # those with the lowest number stay longest
    cell: Callable[[Any], Text | str]
    justify: Literal["left", "right"] = "right"


def table(workers: Sequence[WorkerLine], shown: Sequence[WorkerLine], width: int) -> Table:
    """Give the table of those workers that are shown, with the columns that there is room for."""
    columns = fitting(_columns(workers), width)
    found = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False)
    for column in columns:
        found.add_column(
            column.head, width=min(column.width, width), justify=column.justify, no_wrap=True
        )
    for worker in shown:
        is_away = worker.state in ("gone", "lost")
        found.add_row(*(c.cell(worker) for c in columns), style="dim" if is_away else None)
    return found


def worth_telling(workers: Sequence[WorkerLine], num_workers: int) -> tuple[WorkerLine, ...]:
    """Choose those of whom there is something to tell, then the first ones; by rank."""
    order = sorted(workers, key=lambda w: (w.state in USUAL and not w.is_slow, w.rank))
    return tuple(sorted(order[:num_workers], key=lambda worker: worker.rank))


def fitting(columns: Sequence[Column], width: int) -> list[Column]:
    """Choose the most important columns that fit beside each other; at least one."""
    order = sorted(columns, key=lambda column: column.importance)
    widths = accumulate(column.width + 1 for column in order)
    num_chosen = sum(used - 1 <= width for used in widths)
    return [column for column in columns if column in order[: max(num_chosen, 1)]]


def _columns(workers: Sequence[WorkerLine]) -> list[Column]:
    ranks = max(4, *(len(str(worker.rank)) for worker in workers))
    pids = max(3, *(len(_pid(worker)) for worker in workers))
    steps = max(4, *(len(_step(worker)) for worker in workers))
    return [
        Column("rank", ranks, 0, lambda w: str(w.rank)),
        Column("pid", pids, 8, lambda w: Text(_pid(w), "dim")),
        Column("state", 7, 5, _state, "left"),
        Column("step", steps, 1, _step),
        Column("mostly", 8, 2, _mostly, "left"),
        Column("", 4, 6, _share),
        Column("its time", BAR_WIDTH, 7, _bar, "left"),
        Column(" ms/step", 8, 3, _speed, "left"),
        Column("memory", 8, 4, lambda w: size(w.process.memory_bytes)),
        Column("CPU", 5, 9, _cpu),
        *(_of_devices() if any(worker.device for worker in workers) else ()),
    ]


def _of_devices() -> list[Column]:
    """Give the columns of those that compute on a device with memory of its own."""
    return [
        Column("device", 8, 3, lambda w: size(w.device.now if w.device else None)),
        Column("most", 8, 4, lambda w: size(w.device.most if w.device else None)),
    ]


def _pid(worker: WorkerLine) -> str:
    return "–" if worker.pid is None else str(worker.pid)


def _step(worker: WorkerLine) -> str:
    return "–" if worker.num_done is None else f"{worker.num_done:,}"


def _state(worker: WorkerLine) -> Text:
    return Text(worker.state, _STATE_STYLES.get(worker.state, "dim"))


def _mostly(worker: WorkerLine) -> Text:
    """Show the longest phase; of one that does nothing, why."""
    if worker.state not in USUAL:
        return _state(worker)
    if not worker.shares:
        return Text("–")
    phase = max(PHASES, key=worker.shares.__getitem__)
    return Text(phase, STYLES[PHASES.index(phase)])


def _share(worker: WorkerLine) -> str:
    return f"{max(worker.shares.values()):.0%}" if worker.shares else ""


def _bar(worker: WorkerLine) -> Text:
    bar = Text()
    if worker.shares:
        shares = [worker.shares[phase] for phase in PHASES]
        for phase, style, num_cells in zip(PHASES, STYLES, cells(shares, BAR_WIDTH), strict=True):
            bar.append(phase[0] * num_cells, f"reverse {style}")
    return bar


def cells(shares: Sequence[float], num_cells: int) -> list[int]:
    """Divide cells among shares that add up to one, so that all cells are given out."""
    ends = [min(round(total * num_cells), num_cells) for total in accumulate(shares, initial=0.0)]
    ends[-1] = num_cells
    return [end - begin for begin, end in pairwise(ends)]


def _speed(worker: WorkerLine) -> Text:
    if worker.work_s is None:
        return Text(f"{'–':>8}")
    ms = worker.work_s * 1e3
    shown = f"{ms:,.0f}" if ms >= 1000 else f"{ms:.3g}"
    return Text(f"{shown:>7}!", "bold yellow") if worker.is_slow else Text(f"{shown:>7}")


def _cpu(worker: WorkerLine) -> str:
    cpu = worker.process.cpu
    return "–" if cpu is None else f"{min(cpu, 999):.0%}"
