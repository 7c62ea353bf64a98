"""From events to values: which passes belong to which step, what is training, what is evaluation?

A forward pass that a backward pass follows is training. One without gradients, on samples of a
loader that nobody trains with, is evaluation. Events are read from the files that the processes
wrote, and samples of different ranks that are the same one are named alike.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from unisono.tools.verify.recorder import events_path
from unisono.tools.verify.trace import (
    Collective,
    EvaluationPass,
    Gradient,
    Iteration,
    Micro,
    ModelState,
    OptimizerStep,
    RankTrace,
)


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
    """Read the trace of one rank."""
    trace = RawTrace(rank)
    for event in _lines(events_path(folder, rank)):
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


Event = dict[str, Any]


def resolve(trace: RawTrace, identities: Identities) -> RankTrace:
    """Make values of one rank's events."""
    reading = _Reading(trace, identities)
    return RankTrace(
        rank=trace.rank,
        steps=tuple(reading.steps()),
        iterations=tuple(reading.iterations()),
        evaluations=tuple(reading.evaluations()),
        how=trace.how,
    )


class _Reading:
    def __init__(self, trace: RawTrace, identities: Identities) -> None:
        self._trace, self._identities = trace, identities
        self._forwards = {event["f"]: event for event in trace.of("f")}
        firsts = map(self._first_trained, trace.of("backward"))
        self._trained = {event["f"]: event for event in firsts if event is not None}
        trained = self._trained.values()
        self._train_loaders = {event["at"][0] for event in trained if event["at"] is not None}

    def _first_trained(self, backward: Event) -> Event | None:
        """Find the forward pass that a backward pass follows."""
        numbers = range(max(0, backward["since"]), backward["to"])
        known = [self._forwards[number] for number in numbers if number in self._forwards]
        return next((forward for forward in known if forward["grad"]), None)

    def _samples(self, forward: Event) -> tuple[str, ...]:
        """Name a forward pass's samples: those of its batch, unless it got only a part of them."""
        rows = tuple(f"row {row}" for row in forward["rows"])
        kept = self._batch(forward)
        if kept is None or len(kept) != len(rows):
            return rows
        named = self._name(forward["at"][0], kept)
        return rows if named is None else named

    def _batch(self, forward: Event) -> list[int] | None:
        """Find the indices that a forward pass's batch has."""
        if forward["at"] is None:
            return None
        loader, epoch, batch = forward["at"]
        kept = self._trace.epochs.get((loader, epoch), {}).get("kept") or []
        return kept[batch] if batch < len(kept) else None

    def _name(self, loader: int, indices: Iterable[int]) -> tuple[str, ...] | None:
        dataset = self._trace.loaders[loader]["dataset"]
        return self._identities.name(self._trace, dataset, indices)

    def steps(self) -> Iterator[OptimizerStep]:
        gathered: dict[int, _SinceStep] = {}
        since = _SinceStep()
        state: ModelState | None = None
        for event in self._trace.events:
            match event["t"]:
                case "state":
                    state = ModelState(**_fields(event))
                case "f":
                    since.draws |= event["grad"] and event["training"] and event["draws"]
                    since.forwards.append(event)
                case "backward":
                    first = next((f for f in since.forwards if f["f"] in self._trained), None)
                    since.close(first, () if first is None else self._samples(first))
                case "no_sync":
                    since.no_sync = True
                case "step":
                    # Each optimizer's step has the passes since its own last one.
                    for other in gathered.values():
                        other.add(since)
                    yield _step(event, gathered.pop(event["optimizer"], since), state)
                    gathered[event["optimizer"]] = _SinceStep()
                    since = _SinceStep()

    def iterations(self) -> Iterator[Iteration]:
        roles, sliced = self._roles()
        for (number, epoch), event in self._trace.epochs.items():
            yield Iteration(
                loader=number,
                epoch=epoch,
                role=roles.get(number, ""),
                plan=self._plan(number, epoch),
                order=event.get("order", ""),
                is_sorted=event.get("is_sorted", False),
                is_sliced=number in sliced,
                num_left=self._num_left(number, epoch),
                **self._trace.loaders[number]["facts"],
            )

    def _num_left(self, loader: int, epoch: int) -> int:
        """Count the batches at an iteration's end that nobody trained with, where it is over."""
        kept = self._trace.epochs[loader, epoch].get("kept") or ()
        places = [forward["at"] for forward in self._trained.values() if forward["at"] is not None]
        trained = [batch for *place, batch in places if place == [loader, epoch]]
        is_over = (loader, epoch + 1) in self._trace.epochs or self._trace.how == "ended"
        return len(kept) - max(trained) - 1 if trained and is_over else 0

    def _roles(self) -> tuple[dict[int, str], set[int]]:
        """Say what loaders are used for, and of which batches only parts are trained with."""
        roles: dict[int, str] = {}
        sliced = set()
        for forward in self._forwards.values():
            if forward["at"] is None:
                continue
            loader = forward["at"][0]
            if loader in self._train_loaders:
                roles[loader] = "train"
                kept = self._batch(forward) or ()
                if forward["f"] in self._trained and 0 < len(forward["rows"]) < len(kept):
                    sliced.add(loader)
            elif _is_evaluating(forward):
                roles[loader] = "eval"
        return roles, sliced

    def evaluations(self) -> Iterator[EvaluationPass]:
        between: list[Event] = []
        for event in self._trace.events:
            if event["t"] == "f" and event["f"] in self._trained:
                yield from self._evaluation(between, is_finished=True)
                between = []
            elif event["t"] == "collective" or (event["t"] == "f" and self._evaluates(event)):
                between.append(event)
        yield from self._evaluation(between, is_finished=self._trace.how in ("ended", "stopped"))

    def _evaluation(self, events: list[Event], *, is_finished: bool) -> Iterator[EvaluationPass]:
        """Make one evaluation of what happened between two passes of training, if there is one."""
        passes = [event for event in events if event["t"] == "f" and self._samples(event)]
        if not passes:
            return
        calls = [e for e in events[events.index(passes[0]) :] if e["t"] == "collective"]
        whole: dict[tuple[int, int], tuple[str, ...]] = {}
        direct: list[str] = []
        for event in passes:
            place = None if event["at"] is None else (event["at"][0], event["at"][1])
            plan = None if place is None else self._plan(*place)
            if place is None or plan is None:
                direct += self._samples(event)
            else:
                whole[place] = plan
        yield EvaluationPass(
            samples=(*(name for plan in whole.values() for name in plan), *direct),
            seen=tuple(name for event in passes for name in self._samples(event)),
            rows=tuple(row for event in passes for row in event["rows"]),
            collectives=tuple(Collective(**_fields(call)) for call in calls),
            is_finished=is_finished,
        )

    def _evaluates(self, forward: Event) -> bool:
        if forward["f"] in self._trained or not _is_evaluating(forward):
            return False
        at = forward["at"]
        return not forward["training"] if at is None else at[0] not in self._train_loaders

    def _plan(self, loader: int, epoch: int) -> tuple[str, ...] | None:
        plan = self._trace.epochs.get((loader, epoch), {}).get("plan")
        return None if plan is None else self._name(loader, plan)


class _SinceStep:
    """What happened since an optimizer's last step."""

    def __init__(self) -> None:
        self.forwards: list[Event] = []
        self.micros: tuple[Micro, ...] = ()
        self.draws = self.no_sync = False

    def close(self, first: Event | None, samples: tuple[str, ...]) -> None:
        """End a forward and backward pass."""
        rows = () if first is None else tuple(first["rows"])
        self.micros += (Micro(samples, rows),)
        self.forwards = []

    def add(self, other: _SinceStep) -> None:
        """Take in what happened until another optimizer's step."""
        self.micros += other.micros
        self.draws |= other.draws
        self.no_sync |= other.no_sync


def _fields(event: Event) -> Event:
    return {name: value for name, value in event.items() if name != "t"}


def _is_evaluating(forward: Event) -> bool:
    return not forward["grad"] or not forward["training"]


def _step(event: Event, since: _SinceStep, state: ModelState | None) -> OptimizerStep:
    lr = tuple(event["lr"])
    gradients = {name: Gradient(**facts) for name, facts in event["gradients"].items()}
    return OptimizerStep(
        **{**_fields(event), "lr": lr, "gradients": gradients},
        micros=since.micros,
        state=state,
        draws=since.draws,
        no_sync=since.no_sync,
    )
