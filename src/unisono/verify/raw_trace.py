"""Reads what the processes recorded: lines of JSON, as far as they were written."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from unisono.verify.recorder import events_path


@dataclass(slots=True)
class RawTrace:
    """One rank's events. Indices in it are those of the datasets behind all ``Subset``."""

    rank: int
    events: list[dict[str, Any]] = field(default_factory=list)  # in order
    loaders: dict[int, dict[str, Any]] = field(default_factory=dict)  # by number
    # plans by loader and iteration
    epochs: dict[tuple[int, int], dict[str, Any]] = field(default_factory=dict)
    # hashes of samples by dataset and index
    contents: dict[int, dict[int, str]] = field(default_factory=dict)
    lengths: dict[int, int] = field(default_factory=dict)  # of datasets
    fetches: list[dict[str, Any]] = field(default_factory=list)  # of loader processes
    how: str = ""  # how the program ended; empty if it was killed
    is_exact: bool = False  # it trains with Unisono


def read_trace(folder: Path, rank: int) -> RawTrace:
    """Read the trace of one rank; what a killed process left half written is left out."""
    trace = RawTrace(rank)
    for event in _lines(events_path(folder, rank)):
        _take(trace, event)
    for path in sorted(folder.glob(f"rank{rank}.loader*.jsonl")):
        trace.fetches.extend(_lines(path))
    return trace


def _lines(path: Path) -> list[dict[str, Any]]:
    events = []
    if path.exists():
        for line in path.read_text().splitlines():
            try:
                events.append(json.loads(line))
            except ValueError:
                break
    return events


def _take(trace: RawTrace, event: dict[str, Any]) -> None:
    match event["t"]:
        case "loader":
            trace.loaders[event["k"]] = event
        case "epoch":
            trace.epochs[event["k"], event["e"]] = event
        case "contents":
            hashes = {int(index): value for index, value in event["hashes"].items()}
            trace.contents[event["dataset"]] = hashes
            trace.lengths[event["dataset"]] = event["length"]
        case "fetch":
            trace.fetches.append(event)
        case "end":
            trace.how = event["how"]
        case "exact":
            trace.is_exact = True
    trace.events.append(event)
