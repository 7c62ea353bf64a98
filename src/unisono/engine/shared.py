"""One step on the workers of one host, through shared memory.

::

    each shard      seed → buffers back → forward, backward → push        (every worker its own)
    publish         parts and rows lie in the arena
    meet            ───────────────────────────────────────  somebody lost: its shards, meet again
    sum, update     every worker its pieces of all parameters             (or the lead all)
    meet            ───────────────────────────────────────  somebody lost: back to the snapshot

Between the two meetings parameters change; outside of them nobody writes what another reads. A
worker lost before the first meeting costs nothing but its shards, which the others compute. One
that is lost between the two leaves the parameters torn; the newest snapshot is put back then.
World size 1 takes the same way.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from unisono.c10d.forbidden import IN_AN_UPDATE, forbid
from unisono.comm.host import Live
from unisono.comm.team import Team
from unisono.engine import randomness
from unisono.engine.arena import Arena
from unisono.engine.clipping import Clipping, norm_of
from unisono.engine.gradients import GradientStack
from unisono.engine.laps import Laps, Phase
from unisono.engine.loss import (
    ShardLoss,
    check_differentiable,
    is_finite,
    non_finite,
    non_finite_norm,
    non_finite_unscaled,
)
from unisono.engine.rows import Form, Rows, StepTotals, non_finite_shard
from unisono.engine.scaling import SMALLEST, LossScaling
from unisono.engine.state import SharedState
from unisono.engine.summing import OrderedSum
from unisono.engine.update import SlicedUpdate, Update, WholeUpdate, pass_for_stepped
from unisono.plan.seeds import seed_of
from unisono.plan.shards import Held, assign, take_over
from unisono.plan.slices import cut
from unisono.plan.summation import parts_of


class SharedEngine:
    """Computes steps while it is bound to an arena. Final.

    Args:
        model, optimizer, shards, key, arena, live: see :class:`SharedState`.
        seed: the run's.
        team: the workers.
        clipping: how gradients are clipped.
        scaling: how losses are scaled; None: not at all.

    Attributes:
        gradient_norm: of the last step's gradients, before they were clipped by it; else None.
        is_skipped: whether the last step's gradients were not finite with a scaled loss.
        state: what all workers share.
        laps: where the time of the step under way goes on this worker.
        shards: those that this worker computes, as long as nobody is lost.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        *,
        shards: int,
        seed: int,
        team: Team,
        key: int,
        arena: Arena | None = None,
        live: Live | None = None,
        clipping: Clipping | None = None,
        scaling: LossScaling | None = None,
    ) -> None:
        self._clipping = clipping or Clipping()
        self._scaling, self.is_skipped = scaling, False
        self._optimizer, self._team, self._seed = optimizer, team, seed
        self.state = SharedState(
            model, optimizer, shards=shards, team=team, key=key, arena=arena, live=live
        )
        self._arena, self._parameters = self.state.arena, self.state.parameters
        self._buffers = self.state.buffers
        self._rows = Rows(self._arena)
        self.laps = Laps()
        self.gradient_norm: float | None = None
        self._held: Held = {}
        self._copied: int | None = None
        self._keeper: int | None = None
        self._divide()

    def begin(self, step: int, keeper: int) -> None:
        """Start a step whose first non-empty shard is `keeper`."""
        if self._crew != self._team.crew:
            self._divide()
        self.state.check_untouched()
        self._keeper = keeper
        self.state.structure.begin()
        self._buffers.begin()
        self._team.note_step(step)
        self._team.faults.meet("begin", step)
        self._stack.discard()
        self.state.clear_gradients()
        self.state.placeholders.begin(step)
        self.laps.begin()

    def start_shard(self, step: int, shard: int) -> None:
        """Prepare generators and buffers for one shard's forward pass."""
        self._team.faults.meet("shard", step)
        place = step * self._arena.plan.shards + shard
        randomness.seed_generators(seed_of("train", self._seed, place))
        self._buffers.restore()
        self.state.placeholders.remove()

    def finish_shard(self, step: int, shard: int, loss: ShardLoss, share: float) -> None:
        """Differentiate one shard's loss and take its gradients.

        Args:
            step: counted over the whole run.
            shard: which one.
            loss: what the loss function returned.
            share: the shard's part of the global batch's samples, the weight of a mean.

        Raises:
            RuntimeError: something else has called ``backward``.
            ValueError: the loss depends on no parameter.
        """
        self.state.placeholders.check()
        self._rows.write(shard, loss)
        if self._scaling is None and not is_finite(loss):
            # Everybody will read the row and raise the same error; nobody updates anything.
            self._stack.push_nothing(shard)
            return
        check_differentiable(loss)
        weight = 1.0 if loss.is_sum else share
        tensor = loss.tensor if self._scaling is None else self._scaling.scaled(loss.tensor)
        torch.autograd.backward(tensor, torch.full_like(tensor, weight))
        self._stack.push(shard)
        for parameter in self.state.fixed:
            parameter.grad = None
        if shard == self._keeper:
            self._buffers.keep()
        self.state.placeholders.set()

    def skip_shard(self, shard: int) -> None:
        """Take into account that a shard has no samples in this step."""
        self._stack.push_nothing(shard)
        self._rows.write(shard, None)

    def arrive(self, step: int) -> list[int] | None:
        """Meet the others once the own shards are done. Collective.

        Returns:
            None when the shards of the whole step are done. Else somebody was lost, and these are
            to be computed here too, maybe none; then this is called again.
        """
        self.state.check_untouched()
        self.state.placeholders.check()
        self.state.structure.check()
        self._team.faults.meet("gradients", step)
        if self._team.faults.flips(step):
            self._flip_a_bit()
        if self._meet(f"gradients of step {step}", Phase.BACKWARD):
            if self._copied is not None:
                self.state.snapshots.complete(self._copied)
                self._copied = None
            self.state.placeholders.set()  # also where no shard of this worker's had samples
            return None
        # The snapshot is not known to be whole; the one before it still is.
        self._copied = None
        self._held, new = take_over(self._held, self._team.crew.ranks)
        mine = new[self._team.world.rank]
        shards = self._arena.plan.shards
        parts = [part for run in mine for part in parts_of(run, shards)]
        self._stack = GradientStack(self._arena, self._parameters, parts)
        # Now, while nobody updates: what it reads of the optimizer's state must be this step's.
        self._divide_update()
        return [shard for run in mine for shard in run]

    def finish(self, step: int, plan_next: int) -> tuple[StepTotals, bool]:
        """Sum and update. Collective: every rank calls it once the step's shards are done.

        Args:
            step: counted over the whole run.
            plan_next: what the lead plans before the next step; others say 0.

        Returns:
            What the step had to say, and whether it is done; if not, somebody was lost in the
            midst of the update, and :meth:`go_back` must be called.

        Raises:
            NonFiniteLossError: the loss of a shard is NaN or infinite, or, where losses are scaled,
                gradients are with any scale; nothing was updated.
            RuntimeError: something else changed the parameters meanwhile.
        """
        self.state.check_untouched()
        self.state.check_update()
        self.state.placeholders.remove()
        rows = self._rows.read()
        bad = non_finite_shard(rows)
        if bad is not None and self._scaling is None:
            self._team.meet(f"bad loss in step {step}")
            shard, value = bad
            raise non_finite(value, step, shard)
        totals = self._rows.totals(rows)
        if self.state.is_lost:
            return totals, False
        present = self._sum.add()
        if totals.form == Form.SUM:
            self._divide_sums(present, totals.weight)
        if not self._unscale(present, step, bad) or not self._clip(present, step):
            return totals, False
        self.laps.lap(Phase.SUMMING)
        if not self.state.is_sliced and not self._meet(f"sums of step {step}", Phase.SUMMING):
            return totals, False
        self._team.faults.meet("update", step)
        if self.is_skipped:
            pass_for_stepped(self._optimizer)
        else:
            self._apply(present)
        self._team.faults.meet("updated", step)
        self._team.plan(step + 1, plan_next)
        if not self._meet(f"update of step {step}", Phase.UPDATING):
            return totals, False
        self._update.commit()
        self._buffers.commit()
        if self._scaling is not None:
            self._scaling.update(is_skipped=self.is_skipped)
        self.state.remember()
        randomness.seed_generators(seed_of("between", self._seed, step))
        self.laps.lap(Phase.UPDATING)
        self._team.note_times(step, self.laps.times)
        self._team.faults.meet("commit", step)
        return totals, True

    def take_snapshot(
        self, facts: Mapping[str, Any], extras: Mapping[str, torch.Tensor], *, wait: bool
    ) -> int | None:
        """Copy the whole state. Collective, between two steps.

        Args:
            facts: what is to be known beside it, plain JSON.
            extras: what is to be kept beside it.
            wait: meet the others, so that it is whole when this returns; else it is after the
                next step's shards are done.

        Returns:
            The slot; None if meanwhile the lead was lost with what it alone had.
        """
        while not self.state.is_lost:
            slot = self.state.copy(facts, extras)
            self._team.faults.meet("snapshot", facts["position"]["step"])
            if not wait:
                self._copied = slot
                return slot
            if self._team.meet("snapshot"):
                self.state.snapshots.complete(slot)
                return slot
        return None

    def go_back(self) -> None:
        """Put the newest snapshot back, after a worker was lost in the midst of an update.

        Collective. What is not in the arena is the caller's to put back.
        """
        self._copied = None
        self.state.clear_gradients()
        self.state.put_back()
        self._divide()

    def _divide(self) -> None:
        """Work out which shards and which pieces are this worker's, from who is in the crew."""
        team, num_shards = self._team, self._arena.plan.shards
        ranges = assign(num_shards, team.size)
        self._held = {rank: [shards] for rank, shards in zip(team.crew.ranks, ranges, strict=True)}
        self.shards = ranges[team.position]
        parts = parts_of(self.shards, num_shards)
        self._stack = GradientStack(self._arena, self._parameters, parts)
        self._crew = team.crew
        self._divide_update()

    def _divide_update(self) -> None:
        """Work out what this worker adds up and updates, from who holds what and who is there."""
        team, state = self._team, self.state
        runs = [run for rank in self._held for run in self._held[rank]]
        parts = [part for run in runs for part in parts_of(run, self._arena.plan.shards)]
        pieces = cut([p.numel() for p in self._parameters], team.size)[team.position]
        self._sum = OrderedSum(self._arena, parts, pieces)
        self._update: Update = (
            SlicedUpdate(
                self._optimizer,
                self._parameters,
                self._arena,
                state.keys,
                pieces,
                self._sum.totals,
            )
            if state.is_sliced
            else WholeUpdate(self._optimizer, self._parameters, self._arena, acts=team.is_lead)
        )

    def _flip_a_bit(self) -> None:
        """Damage what this worker has computed, for tests."""
        part = parts_of(self.shards, self._arena.plan.shards)[0]
        byte = self._arena.gradients[part.lo].everything()
        byte[2] ^= 1

    def _divide_sums(self, present: Sequence[bool], weight: float) -> None:
        """Turn sums into means over the true weight."""
        totals = self._totals(present)
        if totals:
            torch._foreach_div_(totals, weight)

    def _apply(self, present: Sequence[bool]) -> None:
        """Update, where one worker may do it for all."""
        before = forbid(IN_AN_UPDATE)
        try:
            self._update.apply(present)
        finally:
            forbid(before)

    def _unscale(self, present: Sequence[bool], step: int, bad: tuple[int, float] | None) -> bool:
        """Unscale this worker's pieces, and find out whether all skip the step. Collective.

        Returns:
            Whether all have; False if somebody was lost.
        """
        if self._scaling is None:
            return True
        crew = self._team.crew
        mine = b"finite" if self._scaling.unscale(self._totals(present)) else b""
        self.laps.lap(Phase.SUMMING)
        heard = self._team.gather(mine, f"scale of step {step}")
        self.laps.lap(Phase.WAITING)
        if self._team.crew != crew:
            return False
        self.is_skipped = not all(heard.values())
        if self.is_skipped and self._scaling.scale <= SMALLEST:
            raise non_finite_unscaled(self._scaling.scale, step, bad)
        return True

    def _clip(self, present: Sequence[bool], step: int) -> bool:
        """Clip this worker's pieces of the gradients. Collective.

        Returns:
            Whether all have; False if somebody was lost.
        """
        if self.is_skipped:
            self.gradient_norm = None if self._clipping.norm is None else math.inf
            return True
        self._clipping.clip_values(self._totals(present))
        if self._clipping.norm is None:
            return True
        if not self._meet(f"sums of step {step}", Phase.SUMMING):
            return False
        whole = self._arena.gradients[0].tensors()
        norm = norm_of([total for total, here in zip(whole, present, strict=True) if here])
        self.gradient_norm = norm.item()
        if not math.isfinite(self.gradient_norm):
            self._team.meet(f"bad norm in step {step}")
            raise non_finite_norm(self.gradient_norm, step)
        if not self._meet(f"norm of step {step}", Phase.SUMMING):
            return False
        self._clipping.scale(self._totals(present), norm)
        return True

    def _meet(self, purpose: str, before: Phase) -> bool:
        """Meet the others within a step; the time until here was for `before`. Collective."""
        self.laps.lap(before)
        all_came = self._team.meet(purpose)
        self.laps.lap(Phase.WAITING)
        return all_came

    def _totals(self, present: Sequence[bool]) -> list[torch.Tensor]:
        """View this worker's pieces of the summed gradients that are there.

        What has no dimensions has none here either: by a scalar of a wider dtype, such as the norm,
        torch multiplies it in that dtype, but a vector in its own.
        """
        return [
            total if self._parameters[piece.index].ndim else total.view(())
            for total, piece in zip(self._sum.totals, self._sum.pieces, strict=True)
            if present[piece.index]
        ]
