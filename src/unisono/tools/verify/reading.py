"""From events to values: which passes belong to which step, what is training, what evaluation?

A forward pass followed by a backward pass is training. One without gradients, on samples of a
loader that is not used for training, is evaluation. A sample has the same name on all ranks.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, final

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

Event = dict[str, Any]


@dataclass(slots=True)
class RawTrace:
    """One rank's events. Its indices are those of the datasets behind all ``Subset``."""

    rank: int
    events: list[Event] = field(default_factory=list)  # in order
    loaders: dict[int, Event] = field(default_factory=dict)  # by number
    epochs: dict[tuple[int, int], Event] = field(default_factory=dict)  # by loader and iteration
    # hashes of samples by dataset and index
    contents: dict[int, dict[int, str]] = field(default_factory=dict)
    lengths: dict[int, int] = field(default_factory=dict)  # of datasets
    how: str = ""  # how the program ended; empty if it was killed

    def add(self, event: Event) -> None:
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

    def of(self, *kinds: str) -> list[Event]:
        """Return the events of some kinds."""
        return [event for event in self.events if event["t"] in kinds]


def read_trace(folder: Path, rank: int) -> RawTrace:
    """Return the trace of one rank."""
    trace = RawTrace(rank)
    path = folder / f"rank{rank}.jsonl"
    for line in path.read_text().splitlines(keepends=True) if path.exists() else ():
        if line.endswith("\n"):  # skip the half line of a killed process
            trace.add(json.loads(line))
    return trace


@final
class Identities:
    """Gives samples the same name on all ranks, of one run or several.

    Ranks may share a dataset, or each create one of their part. If all samples were read, their
    contents identify them, unless two samples of a dataset are equal. Otherwise the index does,
    unless contents contradict it.
    """

    def __init__(self, traces: Sequence[RawTrace]) -> None:
        self._by_content = any(trace.contents for trace in traces) and all(
            length == len(trace.contents[dataset]) == len(set(trace.contents[dataset].values()))
            for trace in traces
            for dataset, length in trace.lengths.items()
        )
        found: dict[int, list[tuple[int, dict[int, str]]]] = {}
        for trace in traces:
            for dataset, contents in trace.contents.items():
                found.setdefault(dataset, []).append((trace.lengths[dataset], contents))
        self._same = {dataset for dataset, known in found.items() if _are_one(known)}

    def name(self, trace: RawTrace, dataset: int, indices: Iterable[int]) -> tuple[str, ...] | None:
        """Return the names of samples; None if they are unknown."""
        if self._by_content:
            contents = trace.contents.get(dataset, {})
            names = [contents.get(index) for index in indices]
            return None if None in names else tuple(map(str, names))
        if dataset in self._same:
            return tuple(f"{dataset}:{index}" for index in indices)
        return None

    def are_shared(self, dataset: int) -> bool:
        """Return whether an index means the same sample on all ranks."""
        return dataset in self._same


def _are_one(known: Sequence[tuple[int, dict[int, str]]]) -> bool:
    """Return whether an index has the same content on all ranks, given lengths and contents."""
    everything = {item for _, contents in known for item in contents.items()}
    indices = {index for index, _ in everything}
    return len({length for length, _ in known}) == 1 and len(everything) == len(indices)


def resolve(trace: RawTrace, identities: Identities) -> RankTrace:
    """Return one rank's events as values."""
    reading = _Reading(trace, identities)
    return RankTrace(
        rank=trace.rank,
        steps=tuple(reading.steps()),
        iterations=tuple(reading.iterations()),
        evaluations=tuple(reading.evaluations()),
        collectives=tuple(
            Collective(**_fields(call)) for call in trace.of("collective") if call["values"]
        ),
        num_idle=len(trace.loaders.keys() - {loader for loader, _ in trace.epochs}),
        how=trace.how,
    )


class _Reading:
    def __init__(self, trace: RawTrace, identities: Identities) -> None:
        self._trace, self._identities = trace, identities
        self._forwards = {event["f"]: event for event in trace.of("f")}
        self._firsts = list(map(self._first_trained, trace.of("backward")))
        self._trained = {event["f"]: event for event in self._firsts if event is not None}
        trained = self._trained.values()
        self._train_loaders = {event["at"][0] for event in trained if event["at"] is not None}

    def _first_trained(self, backward: Event) -> Event | None:
        """Return the forward pass that a backward pass follows."""
        known = [self._forwards.get(f) for f in range(backward["since"], backward["to"])]
        return next((forward for forward in known if forward and forward["grad"]), None)

    def _samples(self, forward: Event) -> tuple[str, ...]:
        """Return a forward pass's samples: those of its batch, unless it got only part of it."""
        kept, rows = self._batch(forward), forward["rows"]
        named = self._name(forward["at"][0], kept) if kept and len(kept) == len(rows) else None
        return tuple(f"row {row}" for row in rows) if named is None else named

    def _batch(self, forward: Event) -> list[int]:
        """Return the indices of a forward pass's batch; empty if they are unknown."""
        loader, epoch, batch = forward["at"] or (-1, -1, 0)
        kept = self._trace.epochs.get((loader, epoch), {}).get("kept") or []
        return kept[batch] if batch < len(kept) else []

    def _name(self, loader: int, indices: Iterable[int]) -> tuple[str, ...] | None:
        dataset = self._trace.loaders[loader]["dataset"]
        return self._identities.name(self._trace, dataset, indices)

    def steps(self) -> Iterator[OptimizerStep]:
        gathered: dict[int, _SinceStep] = {}
        since, firsts = _SinceStep(), iter(self._firsts)
        state: ModelState | None = None
        for event in self._trace.events:
            match event["t"]:
                case "state":
                    state = ModelState(**_fields(event))
                case "f":
                    since.draws |= event["grad"] and event["training"] and event["draws"]
                case "backward":
                    first = next(firsts)
                    rows = () if first is None else tuple(first["rows"])
                    since.micros += (Micro(self._samples(first) if first else (), rows),)
                case "no_sync":
                    since.no_sync = True
                case "step":
                    # Each optimizer's step has the passes since its previous step.
                    for other in gathered.values():
                        other.add(since)
                    gradients = {n: Gradient(**facts) for n, facts in event["gradients"].items()}
                    facts = {**_fields(event), "gradients": gradients, "lr": tuple(event["lr"])}
                    own = gathered.pop(event["optimizer"], since)
                    yield OptimizerStep(**facts, **vars(own), state=state)
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
                num_batches=event.get("num_batches"),
                num_left=self._num_left(number, epoch),
                **self._trace.loaders[number]["facts"],
            )

    def _num_left(self, loader: int, epoch: int) -> int:
        """Return how many batches at an iteration's end were not used for training, if it ended."""
        kept = self._trace.epochs[loader, epoch].get("kept") or ()
        places = [forward["at"] for forward in self._trained.values() if forward["at"] is not None]
        trained = [batch for *place, batch in places if place == [loader, epoch]]
        is_over = (loader, epoch + 1) in self._trace.epochs or self._trace.how == "ended"
        return len(kept) - max(trained) - 1 if kept and trained and is_over else 0

    def _roles(self) -> tuple[dict[int, str], set[int]]:
        """Return the roles of loaders, and those whose batches are used only in part."""
        roles: dict[int, str] = {}
        sliced = set()
        for forward in self._forwards.values():
            if forward["at"] is None:
                continue
            loader = forward["at"][0]
            if loader in self._train_loaders:
                roles[loader] = "train"
                is_part = 0 < len(forward["rows"]) < len(self._batch(forward))
                if forward["f"] in self._trained and is_part:
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
            elif event["t"] in ("collective", "printed") or (
                event["t"] == "f" and self._evaluates(event)
            ):
                between.append(event)
        yield from self._evaluation(between, is_finished=self._trace.how in ("ended", "stopped"))

    def _evaluation(self, events: list[Event], *, is_finished: bool) -> Iterator[EvaluationPass]:
        """Yield the evaluation between two passes of training, if there is one."""
        passes = [event for event in events if event["t"] == "f" and self._samples(event)]
        if not passes:
            return
        since = events[events.index(passes[0]) :]
        calls = [event for event in since if event["t"] == "collective"]
        printed = [event["numbers"] for event in since if event["t"] == "printed"]
        whole: dict[tuple[int, int], tuple[str, ...]] = {}
        direct: list[str] = []
        for event in passes:
            loader, epoch, _ = event["at"] or (-1, -1, -1)
            plan = self._plan(loader, epoch)
            if plan is None:
                direct += self._samples(event)
            else:
                whole[loader, epoch] = plan
        yield EvaluationPass(
            samples=(*(name for plan in whole.values() for name in plan), *direct),
            seen=tuple(name for event in passes for name in self._samples(event)),
            rows=tuple(row for event in passes for row in event["rows"]),
            collectives=tuple(Collective(**_fields(call)) for call in calls),
            printed=tuple(text for numbers in printed for text in numbers),
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


@dataclass
class _SinceStep:
    micros: tuple[Micro, ...] = ()
    draws: bool = False
    no_sync: bool = False

    def add(self, other: _SinceStep) -> None:
        """Add what happened until another optimizer's step."""
        self.micros += other.micros
        self.draws |= other.draws
        self.no_sync |= other.no_sync


def _fields(event: Event) -> Event:
    return {name: value for name, value in event.items() if name != "t"}


def _is_evaluating(forward: Event) -> bool:
    return not forward["grad"] or not forward["training"]
