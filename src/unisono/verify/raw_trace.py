"""What the processes recorded, and which samples of different ranks in it are the same one."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
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
    how: str = ""  # how the program ended; empty if it was killed

    def take(self, event: dict[str, Any]) -> None:
        """Add an event."""
        match event["t"]:
            case "loader":
                self.loaders[event["loader"]] = event
            case "epoch":
                self.epochs[event["loader"], event["epoch"]] = event
            case "contents":
                hashes = {int(index): value for index, value in event["hashes"].items()}
                self.contents[event["dataset"]] = hashes
                self.lengths[event["dataset"]] = event["length"]
            case "end":
                self.how = event["how"]
        self.events.append(event)

    def of(self, *kinds: str) -> list[dict[str, Any]]:
        """Return the events of some kinds."""
        return [event for event in self.events if event["t"] in kinds]


def read_trace(folder: Path, rank: int) -> RawTrace:
    """Read the trace of one rank and of its loaders' processes."""
    trace = RawTrace(rank)
    for path in (events_path(folder, rank), *sorted(folder.glob(f"rank{rank}.loader*.jsonl"))):
        for event in _lines(path):
            trace.take(event)
    return trace


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    """Read lines of JSON; what a killed process left half written is left out."""
    for line in path.read_text().splitlines() if path.exists() else ():
        try:
            yield json.loads(line)
        except ValueError:
            return


class Identities:
    """Names samples. Final.

    Ranks may share a dataset, or each make one of its own part. Where all samples were read, their
    contents say which is which, unless two samples of a dataset have the same. Else the index
    says it, as long as no content speaks against it.

    Args:
        traces: of all ranks, of one run or several.
    """

    def __init__(self, traces: Sequence[RawTrace]) -> None:
        self._traces = traces
        self._by_content = self._are_distinct()
        datasets = {dataset for trace in traces for dataset in trace.contents}
        self._same = {dataset for dataset in datasets if self._is_same(dataset)}

    def name(self, trace: RawTrace, dataset: int, indices: Iterable[int]) -> tuple[str, ...] | None:
        """Name samples; None where nobody can tell which they are."""
        if self._by_content:
            contents = trace.contents.get(dataset, {})
            names = [contents.get(index) for index in indices]
            return None if None in names else tuple(map(str, names))
        if dataset in self._same:
            return tuple(f"{dataset}:{index}" for index in indices)
        return None

    def are_shared(self, dataset: int) -> bool:
        """Tell whether an index means the same sample on all ranks."""
        return dataset in self._same

    def _are_distinct(self) -> bool:
        return any(trace.contents for trace in self._traces) and all(
            length == len(trace.contents[dataset]) == len(set(trace.contents[dataset].values()))
            for trace in self._traces
            for dataset, length in trace.lengths.items()
        )

    def _is_same(self, dataset: int) -> bool:
        known = [trace for trace in self._traces if dataset in trace.contents]
        contents = [set(trace.contents[dataset].items()) for trace in known]
        indices = {index for index, _ in set().union(*contents)}
        lengths = {trace.lengths[dataset] for trace in known}
        return len(lengths) == 1 and len(set().union(*contents)) == len(indices)
