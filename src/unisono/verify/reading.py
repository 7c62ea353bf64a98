"""From events to values: which passes belong to which step, what is training, what is evaluation?

A forward pass that a backward pass follows is training. One without gradients, on samples of a
loader that nobody trains with, is evaluation.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from unisono.verify.identities import Identities
from unisono.verify.rank_trace import (
    Collective,
    DatasetRead,
    EvaluationPass,
    Gradient,
    Iteration,
    Micro,
    ModelState,
    OptimizerStep,
    RankTrace,
)
from unisono.verify.raw_trace import RawTrace

_OF_STATE = ("parameters", "buffers", "rng", "batch_norm", "dtype")


def resolve(trace: RawTrace, identities: Identities) -> RankTrace:
    """Make values of one rank's events."""
    return _Reading(trace, identities).result()


class _Reading:
    def __init__(self, trace: RawTrace, identities: Identities) -> None:
        self._trace, self._identities = trace, identities
        self._forwards = {e["f"]: e for e in trace.events if e["t"] == "f"}
        self._trained: dict[int, dict[str, Any]] = {}
        for event in trace.events:
            if event["t"] == "backward":
                self._note_backward(event)
        trained = self._trained.values()
        self._train_loaders = {f["at"][0] for f in trained if f["at"] is not None}

    def _note_backward(self, event: dict[str, Any]) -> None:
        for number in range(max(0, event["since"]), event["to"]):
            forward = self._forwards.get(number)
            if forward is not None and forward["grad"]:
                self._trained[number] = forward
                return

    def result(self) -> RankTrace:
        trace = self._trace
        return RankTrace(
            rank=trace.rank,
            steps=tuple(self._steps()),
            iterations=tuple(self._iterations()),
            evaluations=tuple(self._evaluations()),
            fetches=tuple(self._fetches()),
            how=trace.how,
        )

    def _samples(self, forward: dict[str, Any]) -> tuple[str, ...]:
        """Name a forward pass's samples: those of its batch, unless it got only a part of them."""
        rows = tuple(f"row {row}" for row in forward["rows"])
        if forward["at"] is None:
            return rows
        loader, epoch, batch = forward["at"]
        kept = self._trace.epochs.get((loader, epoch), {}).get("kept")
        if kept is None or batch >= len(kept) or len(kept[batch]) != len(rows):
            return rows
        named = self._name(loader, kept[batch])
        return rows if named is None else named

    def _name(self, loader: int, indices: Iterable[int]) -> tuple[str, ...] | None:
        dataset = self._trace.loaders[loader]["dataset"]
        return self._identities.name(self._trace, dataset, indices)

    def _steps(self) -> Iterable[OptimizerStep]:
        after = {(e["o"], e["n"]): e for e in self._trace.events if e["t"] == "stepped"}
        gathered: dict[int, _SinceStep] = {}
        since = _SinceStep()
        state: ModelState | None = None
        for event in self._trace.events:
            match event["t"]:
                case "state":
                    state = ModelState(*(event[name] for name in _OF_STATE))
                case "f":
                    since.draws |= event["grad"] and event["training"] and event["draws"]
                    since.forwards.append(event)
                case "loss":
                    since.counts.append(event["count"])
                case "backward":
                    since.close(self._trained, self._samples)
                case "no_sync":
                    since.no_sync = True
                case "collective":
                    since.num_collectives += 1
                case "step":
                    # Each optimizer's step has the passes since its own last one.
                    for other in gathered.values():
                        other.add(since)
                    mine = gathered.pop(event["o"], since)
                    done = after.get((event["o"], event["n"]), {})
                    yield _step(event, done, mine, state)
                    gathered[event["o"]] = _SinceStep()
                    since = _SinceStep()

    def _iterations(self) -> Iterable[Iteration]:
        roles, sliced = self._roles()
        for (number, epoch), event in self._trace.epochs.items():
            facts = self._trace.loaders[number]
            yield Iteration(
                loader=number,
                epoch=epoch,
                role=roles.get(number, ""),
                plan=self._plan(number, epoch),
                order=event.get("local", ""),
                is_sorted=event.get("sorted", False),
                is_sliced=number in sliced,
                drop_last=facts["drop_last"],
                replaces=facts["replaces"],
                has_set_epoch=facts["has_set_epoch"],
                sampler=facts["sampler"],
            )

    def _roles(self) -> tuple[dict[int, str], set[int]]:
        roles: dict[int, str] = {}
        sliced = set()
        for forward in self._forwards.values():
            if forward["at"] is None:
                continue
            loader, epoch, batch = forward["at"]
            if loader in self._train_loaders:
                roles[loader] = "train"
                kept = self._trace.epochs[loader, epoch].get("kept")
                is_trained = forward["f"] in self._trained
                if is_trained and kept and 0 < len(forward["rows"]) < len(kept[batch]):
                    sliced.add(loader)
            elif _is_evaluating(forward):
                roles[loader] = "eval"
        return roles, sliced

    def _evaluations(self) -> Iterable[EvaluationPass]:
        seen: list[str] = []
        places: dict[tuple[int, int], None] = {}
        direct: list[str] = []
        rows: list[str] = []
        collectives: list[Collective] = []

        def ended(is_finished: bool) -> Iterable[EvaluationPass]:
            if seen:
                yield EvaluationPass(
                    samples=(*self._whole(places), *direct),
                    seen=tuple(seen),
                    rows=tuple(rows),
                    collectives=tuple(collectives),
                    is_finished=is_finished,
                )
            for gathered in (seen, places, direct, rows, collectives):
                gathered.clear()

        for event in self._trace.events:
            if event["t"] == "f" and event["f"] in self._trained:
                yield from ended(True)
            elif event["t"] == "f" and self._evaluates(event):
                samples = self._samples(event)
                seen.extend(samples)
                rows.extend(event["rows"])
                if event["at"] is None or self._plan(*event["at"][:2]) is None:
                    direct.extend(samples)
                else:
                    places[tuple(event["at"][:2])] = None
            elif event["t"] == "collective" and seen:
                collectives.append(
                    Collective(event["name"], tuple(event["values"]), tuple(event.get("given", ())))
                )
        yield from ended(self._trace.how in ("ended", "stopped"))

    def _evaluates(self, forward: dict[str, Any]) -> bool:
        if forward["f"] in self._trained or not _is_evaluating(forward):
            return False
        at = forward["at"]
        return not forward["training"] if at is None else at[0] not in self._train_loaders

    def _plan(self, loader: int, epoch: int) -> tuple[str, ...] | None:
        event = self._trace.epochs.get((loader, epoch), {})
        plan = event.get("plan")
        return None if plan is None else self._name(loader, [i for batch in plan for i in batch])

    def _whole(self, places: Iterable[tuple[int, int]]) -> Iterable[str]:
        for place in places:
            yield from self._plan(*place) or ()

    def _fetches(self) -> Iterable[DatasetRead]:
        for event in self._trace.fetches:
            named = self._identities.name(self._trace, event["dataset"], event["indices"])
            worker = -1 if event["worker"] is None else event["worker"]
            place = (event["dataset"], worker, event["n"])
            samples = tuple(map(str, event["indices"])) if named is None else named
            yield DatasetRead(place, samples, event["drawn"])


class _SinceStep:
    """What happened since an optimizer's last step."""

    def __init__(self) -> None:
        self.forwards: list[dict[str, Any]] = []
        self.counts: list[int] = []
        self.micros: list[Micro] = []
        self.draws = self.no_sync = False
        self.num_collectives = 0

    def close(self, trained: Any, samples: Any) -> None:
        """End a forward and backward pass."""
        first = next((f for f in self.forwards if f["f"] in trained), None)
        counted = sum(self.counts) if self.counts else None
        rows = () if first is None else tuple(first["rows"])
        self.micros.append(Micro(() if first is None else samples(first), rows, counted))
        self.forwards, self.counts = [], []

    def add(self, other: _SinceStep) -> None:
        """Take in what happened until another optimizer's step."""
        self.micros += other.micros
        self.draws |= other.draws
        self.no_sync |= other.no_sync
        self.num_collectives += other.num_collectives


def _is_evaluating(forward: dict[str, Any]) -> bool:
    return not forward["grad"] or not forward["training"]


def _step(
    event: dict[str, Any], done: dict[str, Any], since: _SinceStep, state: ModelState | None
) -> OptimizerStep:
    after = done.get("parameters", {})
    return OptimizerStep(
        number=event["n"],
        optimizer=event["o"],
        kind=event["kind"],
        lr=tuple(event["lr"]),
        ticks=event["ticks"],
        gradients={name: _gradient(facts) for name, facts in event["gradients"].items()},
        parameters={name: (tuple(vector), digest) for name, (vector, digest) in after.items()},
        micros=tuple(since.micros),
        state=state,
        draws=since.draws,
        no_sync=since.no_sync,
        num_collectives=since.num_collectives,
    )


def _gradient(facts: dict[str, Any]) -> Gradient:
    clipped = facts.get("c")
    return Gradient(
        final=tuple(facts["g"]),
        digest=facts["d"],
        passes=tuple(map(tuple, facts["p"])),
        clipped=None if clipped is None else tuple(clipped),
        clipped_digest=facts.get("cd", ""),
        size=facts["size"],
    )
