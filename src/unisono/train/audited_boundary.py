"""Between two steps of a loop that is audited: which steps are, and what follows from a finding.

A snapshot, and so a checkpoint, is only taken after a step that was audited::

    steps       0 1 2 3 4 5 6 7 8 9                     audit_every=4, checkpoint_every=6
    audited           ×   ×   ×   ×                     the last one of a loop, too
    snapshot          └─► └─► └─► └─►

So the newest snapshot is always from before whatever the next audit finds. Then the wrong workers
are ended, the launcher replaces them, and the others go back to it. Without our launcher all raise
an error, and a new start goes on from the newest checkpoint.
"""

from __future__ import annotations

import json
import time
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import replace
from statistics import median
from typing import NamedTuple

from unisono.callbacks.callback import Audit
from unisono.plan.audit import (
    Digests,
    Judgement,
    Opinion,
    is_audited,
    judge,
    judge_hosts,
    judge_kept,
)
from unisono.state.digest import checksum_of, checksums_of, checksums_of_state
from unisono.state.position import Position
from unisono.step.engine import StepEngine
from unisono.train import audit_words
from unisono.train.boundary import Boundary, BoundaryTasks
from unisono.train.interrupts import Interrupts
from unisono.train.loop_plan import LoopPlan
from unisono.train.run_context import RunContext
from unisono.workers.launcher_messages import ComputesWrong
from unisono.workers.membership import Membership
from unisono.workers.team import StepBrokenError

_TIMED_AUDITS = 3
_ATTEMPTS = 2
_ENDED_WITHIN_S = 60.0
_POLL_S = 0.01


class AuditedBoundary(Boundary):
    """A :class:`Boundary` that snapshots audited steps alone. Final.

    Attributes:
        is_audited: whether the audit of the step under way has found nothing, or, between steps,
            that of the one before, or the run has just gone back to its newest snapshot.
    """

    def __init__(
        self, run: RunContext, engine: StepEngine, plan: LoopPlan, interrupts: Interrupts
    ) -> None:
        super().__init__(run, engine, plan.samples, interrupts)
        assert run.options.audit_every is not None
        self._every, self._plan = run.options.audit_every, plan
        self.is_audited = True
        self._postponed: Membership | None = None  # of those who know that the next step is audited
        self._deferred = BoundaryTasks.NOTHING
        self._reports: list[Audit] = []
        self._disputed: _Dispute | None = None
        self._agreed: _Agreed | None = None
        self._agreed_at_snapshot: _Agreed | None = None
        self._has_to_go_back = False
        self._changed_in: int | None = None
        self._shared: set[str] = set()  # what each of several hosts has one copy of, by name
        self._snapshot_s = 0.0
        self._seconds: list[tuple[float, float]] = []

    def begin(self) -> bool:
        """See :class:`Boundary`; notes what all keep then."""
        has_begun = super().begin()
        step = self._kept.position.step - 1
        self._has_to_go_back = not self.compare_kept(step, is_done=True)
        self._agreed_at_snapshot = self._agreed
        return has_begun

    def begin_audited(self) -> bool:
        """Tell, before a step begins, whether it is audited; the same on every worker."""
        position, was_postponed = self._kept.position, self._is_postponed
        self.is_audited, self._postponed = False, None
        end_step = self._plan.totals.end_step(self._plan.samples, position)
        planned = BoundaryTasks(self._team.planned(position.step))
        return (
            was_postponed
            or bool(planned & BoundaryTasks.AUDIT)
            or is_audited(position.step, self._every, end_step)
            or self._ends_at_checkpoint(position)
        )

    def postpone(self) -> None:
        """Have the next step audited in the place of this one. Every rank calls it."""
        self._postponed = self._team.membership

    def plan_next(self) -> None:
        """See :class:`Boundary`; what needs a snapshot waits for an audited step."""
        self._tell_plan(self._due_once_audited())

    def act(self) -> bool:
        """See :class:`Boundary`."""
        self._report()
        if self._has_to_go_back:
            self._has_to_go_back = False
            self.go_back()
            return False
        return super().act()

    def end(self) -> bool:
        """See :class:`Boundary`; replicas are compared where the last step was not audited."""
        self._report()
        if self.is_between_steps and not (self.is_audited or self._exchange.is_lost):
            self._has_to_go_back = not self.still_agree(self._kept.position.step - 1)
        return not self._has_to_go_back and super().end()

    def go_back(self) -> None:
        """See :class:`Boundary`."""
        self.is_audited, self._agreed = True, self._agreed_at_snapshot
        super().go_back()

    def is_disputed(self, step: int) -> bool:
        """Tell whether workers kept different things when they came to a step before."""
        known, generation = self._disputed, self._team.membership.generation
        return known is not None and known[:3] == (step, False, generation)

    def still_agree(self, step: int) -> bool:
        """See whether all workers keep the same once a step is done. Collective.

        Returns:
            As of :meth:`compare_kept`; also False if a worker was lost meanwhile, on several hosts.
        """
        supervisor = self._team.supervisor
        supervisor.can_go_back, is_agreed = True, False
        with suppress(StepBrokenError):
            is_agreed = self.compare_kept(step, is_done=True)
        supervisor.can_go_back = False
        return is_agreed

    def compare_kept(self, step: int, *, is_done: bool) -> bool:
        """See whether all workers keep the same. Collective.

        Args:
            step: the one under way, or just done.
            is_done: whether it is; else what was there when it began is compared.

        Returns:
            Whether they do; False if the run has to go back. Wrong workers have been replaced.

        Raises:
            CorruptionError: they do not, and nobody can be replaced, or it is not known who is
                wrong.
        """
        if self._team.size == 1:
            return True
        team, known = self._team, self._disputed
        membership = team.membership
        now = self._opinions(step, is_done=is_done)
        is_again = known is not None and known[:3] == (step, is_done, membership.generation)
        before = known.opinions if known is not None and is_again else []
        reference = None if is_done else self._kept_before(step)
        if len(team.hosts) == 1:
            judgement = judge_kept(now, before, reference)
        else:
            judgement = judge_hosts(now, before, reference, team.hosts)
        if judgement.ruling != "agreed":
            self._settle_kept(step, is_done, judgement, [*before, *now])
            return False
        if is_again:
            self._drop_dispute(step, now)
        if is_done:
            self._agreed = _Agreed(step, team.membership.generation, now[0].digests)
        return is_done or team.membership == membership

    def common_digests(self) -> dict[str, str]:
        """Sum up a share of what a host's workers use the one copy of; each worker another."""
        common, here = list(self._exchange.common().items()), self._team.neighbours
        share = common[here.index(self._team.world.rank) :: len(here)]
        return {name: checksum_of(tensor) for name, tensor in share}

    def buffer_digests(self, *, is_done: bool) -> dict[str, str]:
        """Sum up this worker's buffers.

        Args:
            is_done: whether the step is; else they are as they were when it began.
        """
        buffers = self._exchange.buffers
        if not is_done:
            buffers.restore()
        values = buffers.values()
        return {f"buffer `{name}`": checksum_of(value) for name, value in values.items()}

    def settle_common(
        self, step: int, names: Sequence[str], seen_by: Collection[int], *, has_changed: bool = True
    ) -> None:
        """Have the run go back, as memory that workers share is wrong. Collective.

        Args:
            step: the one under way, or just done.
            names: of what.
            seen_by: workers that share it.
            has_changed: whether it did while nobody updated it; else it is another than other
                hosts'.

        Raises:
            CorruptionError: it cannot go back, or it has in vain.
        """
        hosts = self._hosts_of(seen_by)
        audit = Audit(step, 0.0, (), tuple(names), (), hosts)
        ranks = [rank for host in hosts for rank in self._team.hosts[host]]
        if not self._keeps or step == self._changed_in:
            has_directory = self._checkpoints is not None
            raise audit_words.changed(
                audit, ranks, has_changed=has_changed, has_directory=has_directory
            )
        self._changed_in = step
        self._reports.append(audit)
        if self._team.position == 0:
            found = audit_words.in_shared(audit, ranks, has_changed=has_changed)
            self.run.say(f"{found}; the run goes back to its newest snapshot")

    def note_passed(self, seconds: float) -> None:
        """Note that the audit of the step just done has found nothing, and what it has added."""
        self._reports.append(Audit(self._kept.position.step - 1, seconds))

    def note_cost(self, audit_s: float, step_s: float) -> None:
        """Say once, when a few audits were timed, what they cost, each with its snapshot.

        Args:
            audit_s: what the audit has added to the step, in seconds.
            step_s: what the step took without, in seconds.
        """
        if self.run.has_told_cost or self._team.is_replacement:
            return
        self._seconds.append((audit_s + self._snapshot_s, step_s))
        position = self._kept.position
        if len(self._seconds) == _TIMED_AUDITS or self._plan.totals.are_reached(position):
            self.run.has_told_cost = True
            if self._team.position == 0:
                audits_s, steps_s = map(median, zip(*self._seconds, strict=True))
                self.run.say(audit_words.cost(audits_s, steps_s, self._every))

    def settle(self, audit: Audit, judgement: Judgement, ranks: Sequence[int]) -> None:
        """Have wrong workers replaced. Collective; then the run has to go back.

        Raises:
            CorruptionError: nobody can be replaced, or it is not known who is wrong.
        """
        has_directory = self._checkpoints is not None
        audit = audit._replace(hosts=self._hosts_of(audit.wrong))
        if judgement.ruling != "wrong":
            ruling = judgement.ruling
            raise audit_words.undecided(audit, ruling, ranks, has_directory=has_directory)
        team, supervisor = self._team, self._team.supervisor
        if not (supervisor.can_replace and self._keeps):
            raise audit_words.corrupt(audit, has_directory=has_directory)
        for rank in set(audit.wrong) & set(team.neighbours):
            pid = team.pid(rank)
            assert pid is not None
            supervisor.tell(ComputesWrong(rank, pid, audit_words.how_ended(audit)))
        if team.world.rank in audit.wrong:
            until_s = time.monotonic() + _ENDED_WITHIN_S
            while time.monotonic() < until_s:  # the launcher ends this process
                time.sleep(_POLL_S)
            raise audit_words.corrupt(audit, has_directory=has_directory)
        with suppress(StepBrokenError):  # so it ends on several hosts: all have met again
            while any(rank in team.membership.ranks for rank in audit.wrong):
                team.meet("audit")
        self._reports.append(audit)

    def _snapshot(self, *, wait: bool) -> int | None:
        start_s = time.perf_counter()
        slot = super()._snapshot(wait=wait)
        self._agreed_at_snapshot = self._agreed
        self._snapshot_s = time.perf_counter() - start_s
        return slot

    def _opinions(self, step: int, *, is_done: bool) -> list[Opinion]:
        """Hear what each worker keeps, now and when this was disputed. Collective."""
        team, kept = self._team, self._kept
        mine = self.buffer_digests(is_done=is_done)
        if self._exchange.has_replicas:
            mine |= checksums_of(kept.model, kept.optimizer)
        share = self._share_of_copy() if len(team.hosts) > 1 else {}
        heard = team.gather(json.dumps([mine, share]).encode(), f"audit of step {step}")
        said = {rank: json.loads(one) for rank, one in heard.items()}
        copies: dict[int, dict[str, str]] = {}
        for ranks in team.hosts if len(team.hosts) > 1 else ():
            copy = {name: digest for rank in ranks for name, digest in said[rank][1].items()}
            copies |= dict.fromkeys(ranks, copy)
            self._shared.update(copy)
        return [Opinion(rank, own | copies.get(rank, {})) for rank, (own, _) in said.items()]

    def _share_of_copy(self) -> dict[str, str]:
        """Sum up a share of the one copy that this host has of the run's state."""
        share, kept = self.common_digests(), self._kept
        if self._exchange.acts and not self._exchange.have_all:
            share |= checksums_of_state(kept.model, kept.optimizer)
        return share

    def _hosts_of(self, ranks: Collection[int]) -> tuple[int, ...]:
        """Say on which of several hosts workers are; on a single one, nothing."""
        hosts = self._team.hosts
        there = (at for at, own in enumerate(hosts) if set(own) & set(ranks))
        return tuple(there) if len(hosts) > 1 else ()

    def _is_of_memory(self, judgement: Judgement) -> bool:
        """Tell whether what is wrong is in memory that workers of a host share."""
        if not judgement.is_of_hosts:
            return False
        each_alone = len(self._hosts_of(judgement.wrong)) == len(judgement.wrong)
        return not (each_alone and self._shared.isdisjoint(judgement.names))

    @property
    def _is_postponed(self) -> bool:
        """Whether the next step is audited; not if somebody has joined who does not know."""
        before, now = self._postponed, self._team.membership
        if before is None or before == now:
            return before is not None
        # One change either loses or joins; of several, each may have been either.
        is_next = now.generation == before.generation + 1
        return is_next and set(now.ranks) < set(before.ranks)

    def _kept_before(self, step: int) -> Digests | None:
        """Give what all kept at the end of the step before, if that is known to all."""
        agreed, generation = self._agreed, self._team.membership.generation
        if agreed is None or agreed[:2] != (step - 1, generation):
            return None
        return agreed.digests

    def _settle_kept(
        self, step: int, is_done: bool, judgement: Judgement, opinions: list[Opinion]
    ) -> None:
        """Have wrong workers replaced; where it is not known who is, the steps shall tell."""
        team = self._team
        self._disputed = None
        if judgement.ruling == "wrong" and self._is_of_memory(judgement):
            self.settle_common(step, judgement.names, judgement.wrong, has_changed=False)
            return
        can_repeat = self._keeps and len(opinions) < _ATTEMPTS * team.size
        if judgement.ruling == "wrong" or not can_repeat:
            audit = Audit(step, 0.0, judgement.wrong, judgement.names)
            self.settle(audit, judgement, team.membership.ranks)
            return
        self._disputed = _Dispute(step, is_done, team.membership.generation, opinions)
        self.postpone()  # the first step that comes again, and then those that follow
        if team.position == 0:
            self.run.say(
                f"what workers keep must be the same, but an audit found that it differs in step "
                f"{step}: {audit_words.what(judgement.names)}; the steps since the newest snapshot "
                f"come again, each with an audit, to see who is wrong"
            )

    def _drop_dispute(self, step: int, now: list[Opinion]) -> None:
        """Go on where all agree now, but it cannot be told who was wrong before."""
        known, self._disputed = self._disputed, None
        assert known is not None
        names = judge([*known.opinions, *now]).names
        self._reports.append(Audit(step, 0.0, (), names))
        if self._team.position == 0:
            self.run.say(
                f"step {step} has come again, and all workers keep the same now; which of them "
                f"was wrong before cannot be told: {audit_words.what(names)}"
            )

    def _due_once_audited(self) -> BoundaryTasks:
        """Say what is to be done before the next step; only the leader's word counts."""
        due = self._due_next()
        snapshots = self._memory.snapshots
        known, next_step = self._disputed, self._kept.position.step + 1
        again = known is not None and next_step <= known.step
        more = BoundaryTasks.AUDIT if again and self._team.is_leader else BoundaryTasks.NOTHING
        if self.is_audited:
            due, self._deferred = due | self._deferred, BoundaryTasks.NOTHING
            if self._recovers and self._team.is_leader and not snapshots.next_is_busy:
                due |= BoundaryTasks.SNAPSHOT
            return due | more
        if due != BoundaryTasks.SNAPSHOT:  # one of many, which will do after the next audit
            self._deferred |= due
        return BoundaryTasks.AUDIT if self._deferred else more

    def _ends_at_checkpoint(self, position: Position) -> bool:
        """Tell whether a checkpoint is due after the step at `position`, whoever leads."""
        every, after = self.run.options.every, replace(position)
        self._advance(after)
        ended = after.epoch if after.batch == 0 else 0
        return every is not None and every.is_due(steps=after.step, epoch_ended=ended, seconds=0.0)

    def _report(self) -> None:
        reports, self._reports = self._reports, []
        for audit in reports:
            self.run.observer.after_audit(audit)
            if audit.wrong and self._team.position == 0:
                found = audit_words.what(audit.names, audit.shards)
                who = f"{audit_words.who(audit)} had {found} wrong in step {audit.step}; "
                self.run.say(
                    f"{who if audit.hosts else ''}the run has gone back to step "
                    f"{self._kept.position.step}, where all workers were right"
                )


class _Agreed(NamedTuple):
    """What all workers of a membership's generation kept at the end of a step."""

    step: int
    generation: int
    digests: Digests


class _Dispute(NamedTuple):
    """What workers keep was different in a step, and it is not known who is wrong."""

    step: int  # which
    is_done: bool  # whether it was
    generation: int  # of the membership: who has joined since does not know
    opinions: list[Opinion]  # what each kept
