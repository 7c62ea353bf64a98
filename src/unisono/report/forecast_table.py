"""A forecast in a terminal: one line for each number of workers, and the curve beside the ideal.

::

    workers   speed-up, on a logarithmic scale
          1  │
          4  ━━━━━━━━━━━━━━━━━━│
         32  ━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━╌╌╌│      │ is the ideal speed-up

Where there is little room, less important columns go first.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from unisono.notices import shown_lines
from unisono.report.table import Column, fitting
from unisono.report.text import duration

_CHART_WIDTH = 100
_MIN_CELLS = 8
_SIGNS, _PLAIN_SIGNS = ("━", "╌", "│"), ("=", ".", "|")

Row = Mapping[str, Any]


def print_forecast(console: Console, found: Mapping[str, Any]) -> None:
    """Print a forecast.

    Args:
        console: prints.
        found: the forecast, as ``unisono plan --json`` prints it.
    """
    rows: Sequence[Row] = found["rows"]
    columns = fitting(list(columns_of(found)), console.width)
    table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False)
    for column in columns:
        table.add_column(column.head, justify=column.justify, no_wrap=True)
    for row in rows:
        table.add_row(*(column.cell(row) for column in columns))
    console.print(table)
    if len(rows) > 1:
        console.print()
        console.print(Text("speed-up, logarithmic; the ideal is at the mark", "dim"))
        has_unicode = not console.options.ascii_only
        for line in chart(rows, min(console.width, _CHART_WIDTH), has_unicode=has_unicode):
            console.print(line)
    console.print()
    for cause, words in found["causes"].items():
        console.print(escape(f"{cause}: {words}"))
    for sentence in found["assumptions"]:
        console.print(Text(shown_lines(sentence), "dim"))


def columns_of(found: Mapping[str, Any]) -> Iterator[Column]:
    """Give the columns of the table, of which a terminal may not have room for all."""
    rows, epochs = found["rows"], found["epochs"]
    alone_s = found["epoch_s_alone"]
    per = "epoch_s" if epochs is None else "total_s"
    head = "epoch" if epochs is None else f"{epochs:,g} epochs"

    def column(head: str, importance: int, cell: Callable[[Row], str]) -> Column:
        width = max(len(head), *(len(cell(row)) for row in rows))
        return Column(head, width, importance, cell, "left" if head == "limit" else "right")

    yield column("workers", 0, lambda row: f"{row['workers']:,}")
    if any(row["hosts"] > 1 for row in rows):
        yield column("hosts", 8, lambda row: f"{row['hosts']:,}")
    yield column("batch", 7, lambda row: f"{row['batch_size']:,}")
    yield column("step", 5, lambda row: duration(row["step_s"]))
    if any(row["step_band_s"] for row in rows):
        yield column("90 % of it", 9, lambda row: _band(row["step_band_s"]))
    if alone_s is not None:
        whole_s = alone_s * (epochs or 1)
        yield column("ideal", 6, lambda row: long_duration(whole_s / row["workers"]))
        yield column(head, 2, lambda row: long_duration(row[per]))
    else:
        yield column("samples/s", 2, lambda row: f"{row['samples_per_second']:,.4g}")
    yield column("speed-up", 1, lambda row: f"{row['speed_up']:,.2f}")
    yield column("efficiency", 3, lambda row: f"{row['efficiency'] * 100:.0f} %")
    yield column("limit", 4, lambda row: str(row["limited_by"] or "–"))


def chart(rows: Sequence[Row], width: int, *, has_unicode: bool = True) -> Iterator[Text]:
    """Draw the speed-up of each row as a bar on a logarithmic scale, with a mark at the ideal.

    Args:
        rows: of the forecast.
        width: in cells.
        has_unicode: whether the terminal can show more than ASCII.
    """
    full, missing, mark = _SIGNS if has_unicode else _PLAIN_SIGNS
    labels = [f"{row['workers']:,}" for row in rows]
    label_width = max(map(len, labels))
    num_cells = width - label_width - 2
    if num_cells < _MIN_CELLS:
        return
    most = math.log(max(max(row["workers"], row["speed_up"]) for row in rows)) or 1.0

    def place(value: float) -> int:
        return round(math.log(max(value, 1.0)) / most * (num_cells - 1))

    for row, label in zip(rows, labels, strict=True):
        reached, ideal = place(row["speed_up"]), place(row["workers"])
        line = Text(f"{label:>{label_width}} ", no_wrap=True)
        line.append(full * min(reached, ideal), "green")
        line.append(missing * (ideal - reached), "dim").append(mark)
        line.append(full * (reached - ideal - 1), "green")
        yield line


def long_duration(seconds: float | None) -> str:
    """Write a time that may be long: in hours from one hour on."""
    if seconds is None:
        return "never"
    hours = seconds / 3600
    if hours < 1:
        return duration(seconds)
    return f"{hours:,.0f} h" if hours >= 1000 else f"{hours:.3g} h"


def _band(band: Sequence[float] | None) -> str:
    return "–" if band is None else "–".join(duration(one) for one in band)
