"""Where on a terminal is what is to be seen of a run?

Lines break between parts, never within one, unless a part alone is wider than the terminal. What is
less important goes first where there is little room: columns from the table, lines from above it,
then workers of whom there is nothing to tell. ::

    title · facts                      ┐
    step ━━━━━━━━━━──── position       │ as many lines as there is room for
    numbers · numbers                  │
    what was kept · trouble · message  ┘
    worker  step  time goes to …       one line a worker
    what the letters mean
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from rich.text import Text

from unisono.report.events import PHASES
from unisono.report.view import USUAL, Condition, View, WorkerLine

BAR_WIDTH = 12
_MIN_BAR = 10
_MIN_ROWS = 3
_MAX_MESSAGE_ROWS = 3
_BETWEEN = " · "
_STYLES = ("cyan", "green", "blue", "red", "magenta", "yellow")  # of the phases
_CONDITIONS = {
    Condition.RUNNING: "green",
    Condition.STILL: "yellow",
    Condition.FAILED: "bold red",
    Condition.GONE: "bold red",
}


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


def draw(view: View, width: int, height: int | None = None, *, has_unicode: bool = True) -> Text:
    """Draw what is to be seen.

    Args:
        view: that.
        width: of the terminal, in cells.
        height: of the terminal; None: as much as it takes, and the message is not cut.
        has_unicode: whether the terminal can show more than ASCII.

    Returns:
        Lines of at most ``width`` cells, at most ``height`` of them; without a ``height`` the
        message is one line, however long.
    """
    width = max(width, 1)
    above = _above(view, width, has_unicode=has_unicode, cuts=height is not None)
    below = _below(view, width)
    num_rows = len(view.workers)
    if height is not None:
        room = max(height, 1)
        # A few workers are worth more than most of what is above them.
        above = _most_important(above, max(room - min(num_rows, _MIN_ROWS) - 1, 1))
        num_rows = min(num_rows, max(room - len(above) - 1, 0))
        below = below[: max(room - len(above) - 1 - num_rows, 0)]
    lines = [line.text for line in above] + _table(view, width, num_rows) + below
    return Text("\n").join(lines)


Lines = list[Text]


@dataclass(frozen=True)
class _Placed:
    """A line above the table."""

    text: Text
    importance: tuple[int, int]  # the least stays longest


def _above(view: View, width: int, *, has_unicode: bool, cuts: bool) -> list[_Placed]:
    condition = _CONDITIONS.get(view.condition, "")
    title = [Text(view.title, "bold")] if view.title else []
    facts = [Text(fact) for fact in view.facts]
    if facts:
        facts[0].stylize(condition)
    message = Text(view.message, condition)
    groups = [
        (2, _flow([*title, *facts], width)),
        (1, _progress(view, width, has_unicode)),
        (3, _flow([Text(number) for number in view.numbers], width)),
        (5, _flow([Text(kept) for kept in view.kept], width)),
        (4, _flow([Text(view.trouble, "yellow")] if view.trouble else [], width)),
        (0, _wrapped(message, width) if cuts else [message] if view.message else []),
    ]
    return [
        _Placed(line, (min(row, 1), importance))
        for importance, lines in groups
        for row, line in enumerate(lines)
    ]


def _most_important(lines: list[_Placed], num_lines: int) -> list[_Placed]:
    order = sorted(range(len(lines)), key=lambda i: lines[i].importance)
    return [lines[i] for i in sorted(order[:num_lines])]


def _flow(parts: Sequence[Text], width: int) -> Lines:
    """Put parts one behind another, on as many lines as it takes."""
    lines: Lines = []
    for part in parts:
        if lines and lines[-1].cell_len + len(_BETWEEN) + part.cell_len <= width:
            lines[-1].append(_BETWEEN, "dim").append_text(part)
        else:
            lines.append(part.copy())
    return [_cut(line, width) for line in lines]


def _wrapped(words: Text, width: int) -> Lines:
    """Break lines between words; only so many of them."""
    lines: Lines = []
    while words and len(lines) < _MAX_MESSAGE_ROWS - 1 and words.cell_len > width:
        at = words.plain.rfind(" ", 0, width + 1)
        if at < 1:
            break
        lines.append(_cut(words[:at], width))
        words = words[at + 1 :]
    return [*lines, _cut(words, width)] if words else lines


def _cut(line: Text, width: int) -> Text:
    line = line.copy()
    line.truncate(width, overflow="ellipsis")
    return line


def _progress(view: View, width: int, has_unicode: bool) -> Lines:
    if view.condition is Condition.AWAITED:
        return []
    if not view.end_step:
        return _flow([Text(f"step {view.num_done:,}"), *map(Text, view.position)], width)
    share = min(view.num_done / view.end_step, 1.0)
    parts = [Text(f"step {view.num_done:,} of {view.end_step:,}"), *map(Text, view.position)]
    first, *others = _flow(parts, width)
    percent = f" {int(share * 100)} %"
    room = width - first.cell_len - len(percent) - 2
    if room >= _MIN_BAR:
        num_cells = min(room, 40)
        num_full = int(share * num_cells)
        full, empty = ("━", "─") if has_unicode else ("=", "-")
        first = first.copy().append("  ")
        first.append(full * num_full, "green").append(empty * (num_cells - num_full), "dim")
        first.append(percent)
    return [first, *others]


def _table(view: View, width: int, num_rows: int) -> Lines:
    """Give the table with so many lines below its head."""
    if num_rows < 1:
        return []
    columns = fitting(_columns(view), width)
    workers, more = view.workers, []
    if num_rows < len(workers):
        workers = worth_telling(workers, num_rows - 1)
        more = [Text(f"and {len(view.workers) - len(workers):,} more workers", "dim")]
    head = Text(" ").join(_aligned(Text(c.head, "bold"), c) for c in columns)
    rows = [_row(columns, worker) for worker in workers]
    return [_cut(line, width) for line in (head, *rows, *more)]


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


def _columns(view: View) -> list[Column]:
    workers = view.workers
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
    cell = _cut(cell, column.width)
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
    found = _main_phase(worker)
    if found is None or worker.state not in USUAL:
        return _state(worker) if found else Text("–")
    return Text(PHASES[found[0]], _STYLES[found[0]])


def _share(worker: WorkerLine) -> Text:
    found = _main_phase(worker)
    return Text("" if found is None else f"{found[1]:.0%}")


def _bar(worker: WorkerLine) -> Text:
    bar = Text()
    if worker.shares:
        shares = [worker.shares[phase] for phase in PHASES]
        for phase, style, num_cells in zip(PHASES, _STYLES, cells(shares, BAR_WIDTH), strict=True):
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


def _below(view: View, width: int) -> Lines:
    """Say who is slow, and what the letters mean."""
    lines = []
    slow = next((worker for worker in view.workers if worker.times_slow), None)
    if slow is not None and slow.times_slow is not None:
        times = f"{min(slow.times_slow, 999):.1f} times as long as the others"
        lines.append(_cut(Text(f"! worker {slow.rank} computes {times}", "yellow"), width))
    steps = "of the last step" if view.num_steps == 1 else f"of the last {view.num_steps:,} steps"
    names = [Text(phase, style) for phase, style in zip(PHASES, _STYLES, strict=True)]
    legend = Text("  ").join([*names, Text(steps, "dim")])
    if any(worker.shares for worker in view.workers) and legend.cell_len <= width:
        lines.append(legend)
    return lines
