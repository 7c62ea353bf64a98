"""A step whose shards are computed twice, by two workers, before anything is added up.

::

    step.shards    the worker's own ── all meet ── those of the next worker ── all tell digests
                   and, where these differ, every disputed shard once more ── all tell digests
    update
    end            digests of what each worker keeps are compared

The loop's body computes what it is given, as it does where a worker was lost.
"""

from __future__ import annotations

import json
from collections.abc import Generator, Iterator, Mapping, Sequence
from time import perf_counter
from types import TracebackType
from typing import Any

from unisono.callbacks.callback import Audit
from unisono.data.loader import Loader, Place
from unisono.plan.audit import Judgement, Opinion, checked_by, judge
from unisono.plan.samples import SamplePlan
from unisono.plan.summation import Node
from unisono.state.position import Position
from unisono.train.audited_boundary import AuditedBoundary
from unisono.train.boundary import Boundary
from unisono.train.step import Step

Found = dict[int, list[Opinion]]
"""By the first shard of a part: what was found of it."""


def next_step(boundary: Boundary, plan: SamplePlan, loader: Loader, position: Position) -> Step:
    """Make the next step of a loop that is audited: one that is, or one that is not."""
    assert isinstance(boundary, AuditedBoundary)
    if boundary.begin_audited():
        return AuditedStep(boundary, plan, loader, position)
    return Step(boundary, plan, loader, position)


class AuditedStep(Step):
    """A :class:`Step` that is audited. Final."""

    def __init__(
        self, boundary: AuditedBoundary, plan: SamplePlan, loader: Loader, position: Position
    ) -> None:
        super().__init__(boundary, plan, loader, position)
        self._audited, self._team = boundary, boundary.run.team
        self._audit_s, self._begun_s = 0.0, perf_counter()
        self._is_settled = self._has_to_go_back = False
        self._common: dict[str, str] = {}
        self._changed: dict[str, None] = {}
        self._seen_by: set[int] = set()
        self._starts: set[str] = set()

    def __enter__(self) -> Step:
        entered = super().__enter__()
        start_s = perf_counter()
        self._common = self._audited.common_digests()
        self._audit_s = perf_counter() - start_s
        return entered

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> bool:
        if error is None and self._has_to_go_back:
            self._engine.end_passes()
            self._is_finished = True
            self._boundary.go_back()
            return False
        if error is None and self._taken and not self._is_settled:
            self._engine.end_passes()
            raise RuntimeError(
                f"with `audit_every`, `step.shards` must be looped over to its end, but was left "
                f"before in step {self.number}: other workers' shards come after the own ones."
            )
        is_handled = super().__exit__(kind, error, traceback)
        if error is None and self.is_done:
            self._compare()
        return is_handled

    def _batches(self) -> Iterator[Any]:
        membership = self._team.membership
        yield from super()._batches()
        if self._team.membership != membership:
            # Parts may have been added up by now; the next step is as good.
            self._audited.postpone()
        elif self._engine.failing_shard is None:  # else nobody updates anything
            start_s = perf_counter()
            self._engine.begin_passes(self._shard_sizes)
            try:
                yield from self._audit()
            finally:
                self._engine.end_passes()
            self._audit_s += perf_counter() - start_s
        self._is_settled = True

    def _audit(self) -> Iterator[Any]:
        """Compute shards of another worker again, and compare what was published."""
        division, ranks = self._engine.exchange.division, self._team.membership.ranks
        checked = ranks[checked_by(self._team.position, self._team.size)]
        held = {part.lo: part for parts in division.parts_of.values() for part in parts}
        self._team.faults.meet("audit", self.number)
        own = self._engine.published_digests()
        again = yield from self._recompute(division.parts_of[checked])
        found = self._tell([*own, *again.items()], self._changes())
        if self._changed and not self._has_to_go_back:
            self._has_to_go_back = True
            self._audited.settle_common(self.number, list(self._changed), self._seen_by)
        if self._has_to_go_back:
            return
        disputed = _disputed(found)
        if disputed or len(self._starts) > 1 or self._audited.is_disputed(self.number):
            # Who started from something else has computed something else.
            are_alike = self._audited.compare_kept(self.number, is_done=False)
            self._has_to_go_back |= not are_alike
        if disputed and not self._has_to_go_back:
            again = yield from self._recompute([held[lo] for lo in disputed])
            more = self._tell(list(again.items()))
            for lo in disputed:
                found[lo] += more.get(lo, [])
        if self._has_to_go_back:
            return
        disputed = _disputed(found)
        if not disputed:
            self._audited.is_audited = True
            return
        self._has_to_go_back = True
        self._accuse({lo: (held[lo], judgement) for lo, judgement in disputed.items()}, found)

    def _recompute(self, parts: Sequence[Node]) -> Generator[Any, None, dict[int, dict[str, str]]]:
        """Give out the batches of these parts; returns what was found of each."""
        recomputation = self._engine.recomputation(parts)
        self._finish_shard = recomputation.finish_shard
        for shard in (shard for part in parts for shard in range(part.lo, part.hi)):
            if self._shard_sizes[shard] == 0:
                recomputation.skip_shard(shard)
                continue
            batch = self._loader.batch(Place(self.epoch, self.batch, shard), ())
            self.model = self._engine.start_shard(shard)
            self._waiting = shard
            yield batch
            if self._waiting is not None:
                yield from self._undone(shard, batch)
        return recomputation.digests

    def _changes(self) -> list[str]:
        """Name what all workers use and has changed since the step began."""
        now = self._audited.common_digests()
        return [name for name in now if now[name] != self._common.get(name)]

    def _tell(
        self, digests: Sequence[tuple[int, Mapping[str, str]]], changes: Sequence[str] = ()
    ) -> Found:
        """Tell all what this worker has found, and hear theirs. Collective."""
        membership = self._team.membership
        start = json.dumps(self._audited.buffer_digests(is_done=False))
        mine = json.dumps([digests, changes, start]).encode()
        heard = self._team.gather(mine, f"audit of step {self.number}")
        # Somebody may have been lost whose pieces nobody has added up.
        self._has_to_go_back |= self._team.membership != membership
        found: Found = {}
        for rank, said in heard.items():
            of_parts, changed, start = json.loads(said)
            self._starts.add(start)
            self._changed |= dict.fromkeys(changed)
            self._seen_by |= {rank} if changed else set()
            for lo, of_part in of_parts:
                found.setdefault(lo, []).append(Opinion(rank, of_part))
        return found

    def _accuse(self, disputed: Mapping[int, tuple[Node, Judgement]], found: Found) -> None:
        """Have whoever computed wrong replaced, be it in one part or in several."""
        guilty = [one for one in disputed.values() if one[1].ruling == "wrong"]
        chosen = guilty or list(disputed.values())[:1]
        wrong = {rank for _, judgement in chosen for rank in judgement.wrong}
        names = dict.fromkeys(name for _, judgement in chosen for name in judgement.names)
        shards = [shard for part, _ in chosen for shard in range(part.lo, part.hi)]
        audit = Audit(self.number, 0.0, tuple(sorted(wrong)), tuple(names), tuple(shards))
        _, first = chosen[0]
        judgement = Judgement(first.ruling, audit.wrong, audit.names)
        ranks = {opinion.rank for part, _ in chosen for opinion in found[part.lo]}
        self._audited.settle(audit, judgement, sorted(ranks))

    def _compare(self) -> None:
        start_s = perf_counter()
        if not self._audited.still_agree(self.number):
            self.is_done = False
            self._boundary.go_back()
        elif self._audited.is_audited:
            now_s = perf_counter()
            audit_s = self._audit_s + now_s - start_s
            self._audited.note_passed(audit_s)
            self._audited.note_cost(audit_s, now_s - self._begun_s - audit_s)


def _disputed(found: Found) -> dict[int, Judgement]:
    judgements = {lo: judge(opinions) for lo, opinions in found.items()}
    return {
        lo: judgement
        for lo, judgement in sorted(judgements.items())
        if judgement.ruling != "agreed"
    }
