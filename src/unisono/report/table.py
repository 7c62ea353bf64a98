"""One line a worker, in as many columns as a terminal has room for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from rich.text import Text

from unisono.report.events import PHASES
from unisono.report.workers import USUAL, WorkerLine

BAR_WIDTH = 12
STYLES = ("cyan", "green", "blue", "red", "magenta", "yellow")  # of the phases

Lines = list[Text]


@dataclass(frozen=True)
class Column:
    """One of the table.

    Attributes:
        head: what stands above it.
        width: in cells.
        importance: those with the lowest number stay longest.
        cell: what it shows of a worker.
        is_left: whether it is aligned left.
    """

    head: str
    width: int
    importance: int
    cell: Callable[[WorkerLine], Text]
    is_left: bool = False


def table(all_workers: Sequence[WorkerLine], width: int, num_rows: int) -> Lines:
    """Give the table with so many lines below its head."""
    if num_rows < 1:
        return []
    columns = fitting(_columns(all_workers), width)
    workers, more = all_workers, []
    if num_rows < len(workers):
        workers = worth_telling(workers, num_rows - 1)
        more = [Text(f"and {len(all_workers) - len(workers):,} more workers", "dim")]
    head = Text(" ").join(_aligned(Text(c.head, "bold"), c) for c in columns)
    rows = [_row(columns, worker) for worker in workers]
    return [cut(line, width) for line in (head, *rows, *more)]


def worth_telling(workers: Sequence[WorkerLine], num_workers: int) -> tuple[WorkerLine, ...]:
    """Choose those of whom there is something to tell, then the first ones; by rank."""
    order = sorted(workers, key=lambda w: (w.state in USUAL and w.times_slow is None, w.rank))
    return tuple(sorted(order[:num_workers], key=lambda worker: worker.rank))


def fitting(columns: Sequence[Column], width: int) -> list[Column]:
    """Choose the most important columns that fit beside each other; at least one."""
    chosen: list[Column] = []
    for column in sorted(columns, key=lambda c: c.importance):
        if chosen and sum(c.width + 1 for c in (*chosen, column)) - 1 > width:
            break
        chosen.append(column)
    return [column for column in columns if column in chosen]


def _columns(workers: Sequence[WorkerLine]) -> list[Column]:
    ranks = max(4, *(len(str(worker.rank)) for worker in workers))
    pids = max(3, *(len(_pid(worker)) for worker in workers))
    steps = max(4, *(len(_step(worker)) for worker in workers))
    return [
        Column("rank", ranks, 0, lambda w: Text(str(w.rank))),
        Column("pid", pids, 8, lambda w: Text(_pid(w), "dim")),
        Column("state", 7, 5, _state, is_left=True),
        Column("step", steps, 1, lambda w: Text(_step(w))),
        Column("mostly", 8, 2, _mostly, is_left=True),
        Column("", 4, 6, _share),
        Column("its time", BAR_WIDTH, 7, _bar, is_left=True),
        Column("ms/step", 8, 3, _speed),
        Column("memory", 7, 4, lambda w: Text(size(w.process.memory_bytes))),
        Column("peak", 7, 10, lambda w: Text(size(w.process.peak_bytes), "dim")),
        Column("CPU", 5, 9, _cpu),
    ]


def _row(columns: Sequence[Column], worker: WorkerLine) -> Text:
    line = Text(" ").join(_aligned(column.cell(worker), column) for column in columns)
    if worker.state in ("gone", "lost"):
        line.stylize("dim")
    return line


def _aligned(cell: Text, column: Column) -> Text:
    cell = cut(cell, column.width)
    padding = " " * (column.width - cell.cell_len)
    return cell.append(padding) if column.is_left else Text(padding).append_text(cell)


def _pid(worker: WorkerLine) -> str:
    return "–" if worker.pid is None else str(worker.pid)


def _step(worker: WorkerLine) -> str:
    return "–" if worker.num_done is None else f"{worker.num_done:,}"


def _state(worker: WorkerLine) -> Text:
    style = {"stopped": "yellow", "gone": "red", "lost": "red", "running": "green"}
    return Text(worker.state, style.get(worker.state, "dim"))


def _main_phase(worker: WorkerLine) -> tuple[int, float] | None:
    if not worker.shares:
        return None
    phase = max(PHASES, key=lambda phase: worker.shares[phase] if worker.shares else 0.0)
    return PHASES.index(phase), worker.shares[phase]


def _mostly(worker: WorkerLine) -> Text:
    """Show the longest phase; of one that does nothing, why."""
    if worker.state not in USUAL:
        return _state(worker)
    found = _main_phase(worker)
    if found is None:
        return Text("–")
    return Text(PHASES[found[0]], STYLES[found[0]])


def _share(worker: WorkerLine) -> Text:
    found = _main_phase(worker)
    return Text("" if found is None else f"{found[1]:.0%}")


def _bar(worker: WorkerLine) -> Text:
    bar = Text()
    if worker.shares:
        shares = [worker.shares[phase] for phase in PHASES]
        for phase, style, num_cells in zip(PHASES, STYLES, cells(shares, BAR_WIDTH), strict=True):
            bar.append(phase[0] * num_cells, f"reverse {style}")
    return bar


def cells(shares: Sequence[float], num_cells: int) -> list[int]:
    """Divide cells among shares that add up to one, so that all cells are given out."""
    ends, total = [0], 0.0
    for share in shares:
        total += share
        ends.append(min(round(total * num_cells), num_cells))
    ends[-1] = num_cells
    return [end - begin for begin, end in pairwise(ends)]


def _speed(worker: WorkerLine) -> Text:
    if worker.work_s is None:
        return Text("–")
    ms = worker.work_s * 1e3
    shown = f"{ms:,.0f}" if ms >= 1000 else f"{ms:.3g}"
    return Text(f"{shown}!", "bold yellow") if worker.times_slow else Text(f"{shown} ")


def _cpu(worker: WorkerLine) -> Text:
    cpu = worker.process.cpu
    return Text("–" if cpu is None else f"{min(cpu, 999):.0%}")


def size(num_bytes: int | None) -> str:
    """Write a number of bytes in at most seven cells."""
    if num_bytes is None:
        return "–"
    value = float(num_bytes)
    for unit in ("B", "kB", "MB", "GB"):
        if value < 999.5:
            return f"{value:.3g} {unit}"
        value /= 1000
    return f"{value:.3g} TB"


def cut(line: Text, width: int) -> Text:
    """Return a line without what has no room."""
    line = line.copy()
    line.truncate(width, overflow="ellipsis")
    return line
