"""What takes all records to know: which passes a step has, what is evaluation, names of samples.

A forward pass followed by a backward pass is training. One without gradients, on samples of a
loader that is not used for training, is evaluation. A sample has the same name on all ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import zip_longest
from typing import Any, final

from unisono.tools.verify.trace import (
    Backward,
    Collective,
    Contents,
    EvaluationPass,
    Forward,
    Iteration,
    Note,
    OptimizerStep,
    RankTrace,
)


@final
class Identities:
    """Gives samples the same name on all ranks, of one run or several.

    Ranks may share a dataset, or each create one of their part. If all samples were read, their
    contents identify them, unless two samples of a dataset are equal. Otherwise the index does,
    unless contents contradict it.
    """

    def __init__(self, traces: Sequence[RankTrace]) -> None:
        self._of_rank = {id(trace): hashes_of(trace) for trace in traces}
        known = [contents for trace in traces for contents in trace.of(Contents)]
        self._by_content = bool(known) and all(
            one.length == len(one.hashes) == len(set(one.hashes)) for one in known
        )
        datasets = {one.dataset for one in known}
        self._same = {n for n in datasets if _are_one([c for c in known if c.dataset == n])}

    def name(self, trace: RankTrace, dataset: int, indices: Sequence[int]) -> list[str] | None:
        """Return the names of samples; None if they are unknown."""
        if self._by_content:
            hashes = self._of_rank[id(trace)].get(dataset, ())
            names = [hashes[index] for index in indices if index < len(hashes)]
            return names if len(names) == len(indices) else None
        return [f"{dataset}:{index}" for index in indices] if dataset in self._same else None

    def are_shared(self, dataset: int) -> bool:
        """Return whether an index means the same sample on all ranks."""
        return dataset in self._same


def hashes_of(trace: RankTrace) -> dict[int, Sequence[str]]:
    """Return hashes of samples by dataset and index, as far as they were read."""
    return {contents.dataset: contents.hashes for contents in trace.of(Contents)}


def _are_one(known: Sequence[Contents]) -> bool:
    """Return whether an index has the same content on all ranks."""
    columns = zip_longest(*(contents.hashes for contents in known))
    is_alike = all(len({*column} - {None}) == 1 for column in columns)
    return is_alike and len({contents.length for contents in known}) == 1


def resolve(traces: Sequence[RankTrace]) -> list[RankTrace]:
    """Return traces with what follows from them all."""
    identities = Identities(traces)
    return [RankTrace(trace.rank, [*_Reading(trace, identities).records()]) for trace in traces]


class _Reading:
    def __init__(self, trace: RankTrace, identities: Identities) -> None:
        self._trace, self._identities = trace, identities
        self._iterations = {iteration.place: iteration for iteration in trace.of(Iteration)}
        self._backwards = trace.of(Backward)
        self._forwards = {one.number: self._with_samples(one) for one in trace.of(Forward)}
        self._passes = [self._forwards.get(one.forward, Forward()) for one in self._backwards]
        self._trained = {one.number for one in self._passes} - {-1}
        self._train_loaders = {one.at[0] for one in self._passes if one.at is not None}

    def records(self) -> Iterator[Any]:
        """Yield all records, and the evaluations."""
        for record in self._trace.records:
            match record:
                case OptimizerStep(backwards=(first, end)):
                    passes, backwards = self._passes[first:end], self._backwards[first:end]
                    yield replace(
                        record,
                        passes=passes,
                        draws=any(one.draws for one in backwards),
                        no_sync=any(one.no_sync for one in backwards),
                    )
                case Iteration():
                    yield self._completed(record)
                case _:
                    yield record
        yield from self._evaluations()

    def _with_samples(self, forward: Forward) -> Forward:
        """Add a forward pass's samples: those of its batch, unless it got only part of it."""
        kept, rows = self._batch(forward), forward.rows
        known = self._name(forward.at, kept) if kept and len(kept) == len(rows) else None
        return replace(forward, samples=[f"row {row}" for row in rows] if known is None else known)

    def _iteration(self, at: Sequence[int] | None) -> Iteration:
        return self._iterations.get((at[0], at[1]), Iteration()) if at else Iteration()

    def _batch(self, forward: Forward) -> Sequence[int]:
        """Return the indices of a forward pass's batch; empty if they are unknown."""
        kept = self._iteration(forward.at).kept
        return kept[forward.at[2]] if forward.at and forward.at[2] < len(kept) else ()

    def _name(self, at: Sequence[int] | None, indices: Sequence[int] | None) -> list[str] | None:
        if indices is None:
            return None
        return self._identities.name(self._trace, self._iteration(at).dataset, indices)

    def _completed(self, iteration: Iteration) -> Iteration:
        """Add the role of an iteration, its samples, and which of its batches were used."""
        loader, kept = iteration.loader, iteration.kept
        own = [one for one in self._forwards.values() if one.at and one.at[0] == loader]
        trained = [one for one in own if one.number in self._trained]
        places = [one.at[2] for one in trained if one.at and one.at[1] == iteration.epoch]
        is_over = (loader, iteration.epoch + 1) in self._iterations or self._trace.how == "ended"
        role = "eval" if not all(one.may_train for one in own) else ""
        return replace(
            iteration,
            role="train" if trained else role,
            plan=self._name(iteration.place, iteration.indices),
            is_sliced=any(0 < len(one.rows) < len(self._batch(one)) for one in trained),
            num_left=len(kept) - max(places) - 1 if kept and places and is_over else 0,
        )

    def _evaluations(self) -> Iterator[EvaluationPass]:
        between: list[Any] = []
        for record in self._trace.records:
            if isinstance(record, Forward):
                forward = self._forwards[record.number]
                if record.number in self._trained:
                    yield from self._evaluation(between, is_finished=True)
                    between = []
                elif self._evaluates(forward):
                    between.append(forward)
            elif isinstance(record, Collective | Note):
                between.append(record)
        yield from self._evaluation(between, is_finished=self._trace.how in ("ended", "stopped"))

    def _evaluates(self, forward: Forward) -> bool:
        if forward.at is None:
            return not forward.is_training
        return not forward.may_train and forward.at[0] not in self._train_loaders

    def _evaluation(self, records: list[Any], *, is_finished: bool) -> Iterator[EvaluationPass]:
        """Yield the evaluation between two passes of training, if there is one."""
        forwards = [one for one in records if isinstance(one, Forward) and one.samples]
        if not forwards:
            return
        since = RankTrace(records=records[records.index(forwards[0]) :])
        whole: dict[tuple[int, int], Sequence[str]] = {}
        direct: list[str] = []
        for forward in forwards:
            place = self._iteration(forward.at).place
            plan = self._name(forward.at, self._iteration(forward.at).indices)
            if plan is None:
                direct += forward.samples
            else:
                whole[place] = plan
        yield EvaluationPass(
            samples=[*(name for plan in whole.values() for name in plan), *direct],
            seen=[name for one in forwards for name in one.samples],
            rows=[row for one in forwards for row in one.rows],
            collectives=since.of(Collective),
            printed=[text for numbers in since.notes("printed") for text in numbers],
            is_finished=is_finished,
        )
