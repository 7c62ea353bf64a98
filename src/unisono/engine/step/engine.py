"""One step, whatever carries its gradients.

::

    each shard      seed → buffers back → forward, backward → add to a part
    publish         finished parts and the shards' records
    gather          ───────────────────────────────────────  somebody lost: its shards, gather again
    add up          this worker's pieces of all parts, in tree order
    scale, clip, update
    share           ───────────────────────────────────────  lost what only one had: go back

Between `gather` and `share` parameters change; outside of them nobody writes what another reads. A
worker lost before the first of them costs nothing but its shards, which the others compute. What
is lost behind it depends on the exchange. World size 1 takes the same way.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import nn
from torch.optim import Optimizer

from unisono.engine.exchange.protocol import Exchange
from unisono.engine.state.contents import updated_parameters
from unisono.engine.state.optimizers import members_of
from unisono.engine.step.bound_model import BoundModel, changed_in_a_pass
from unisono.engine.step.loss import (
    PendingLosses,
    ShardLoss,
    check_differentiable,
    is_known_bad,
    non_finite,
    non_finite_norm,
    non_finite_unscaled,
    read_loss,
)
from unisono.engine.step.records import (
    Phase,
    PhaseTimers,
    Record,
    Records,
    StepTotals,
    non_finite_shard,
)
from unisono.engine.step.shard_passes import Backward, ShardPasses
from unisono.engine.step.transforms import (
    SMALLEST,
    Clipping,
    GradientHook,
    LossScaling,
    OnGradients,
    total_norm,
)
from unisono.engine.step.update import Member, Options, pass_for_stepped
from unisono.errors import NonFiniteLossError
from unisono.runtime.forbidden import IN_A_PASS, IN_AN_UPDATE, forbid
from unisono.runtime.reach import OwnGenerators
from unisono.runtime.workers.team import Team

Met = TypeVar("Met")
_COMPARED, _COMPARED_EVERY = 2, 1024  # steps in which replicas are


class StepEngine:
    """Computes the steps of one loop.

    Args:
        model, optimizer: the user's, as `exchange` has bound them.
        exchange: carries gradients.
        clipping: how gradients are clipped, by optimizer; not at all where one is missing.
        scaling: how losses are scaled, likewise.
        timers: of this worker's phases; None: such as nobody asks for delays.
        on_gradients: the program's function between the sum and the update, if it has one.
        own: generators of the program's own, which are seeded with the default ones.
        watches_program: whether code of the program runs between steps; else changes are only
            looked for now and then.
        are_alike: whether devices compute the same bits, so that replicas are compared.

    Attributes:
        gradient_norm: of the last update's gradients, before they were clipped by it; else None.
        is_skipped: whether the last update's gradients were not finite with a scaled loss.
        present: of which parameters the last update had a gradient.
        members: the optimizers, by name.
        per_sample: by shard computed here, what its loss function has returned per sample.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        exchange: Exchange,
        *,
        seed: int,
        team: Team,
        clipping: Mapping[str, Clipping] | None = None,
        scaling: Mapping[str, LossScaling] | None = None,
        timers: PhaseTimers | None = None,
        on_gradients: OnGradients | None = None,
        own: OwnGenerators | None = None,
        watches_program: bool = True,
        are_alike: bool = True,
    ) -> None:
        clips, scales = clipping or {}, scaling or {}
        self.members = {
            name: Member(name, member, clips.get(name, Clipping()), scales.get(name))
            for name, member in members_of(optimizer).items()
        }
        self._active = list(self.members.values())
        self._clips = any(member.clipping != Clipping() for member in self._active)
        self._scaling, self.is_skipped = self._active[0].scaling, False
        self._optimizer, self._team = optimizer, team
        self.exchange, self._device = exchange, exchange.device
        self._pending = PendingLosses(exchange.copies)
        self.per_sample: dict[int, dict[str, torch.Tensor]] = {}
        self._records, self._options = Records(exchange.memory.arena.rows), Options(optimizer)
        self._bound = BoundModel(model, optimizer, exchange.fixed)
        self.timers, self._watches_program = timers or PhaseTimers(), watches_program
        self._compares = watches_program and are_alike
        self.model = model
        self.passes = ShardPasses(exchange, seed, own)
        self._hook: GradientHook | None = None
        if on_gradients is not None:
            self._hook = GradientHook(on_gradients, list(updated_parameters(model, optimizer)))
        self.gradient_norm: float | None = None
        self.present: Sequence[bool] = ()
        self._copied: int | None = None
        self._read: list[Record] = []  # what the shards of the step have come to, all done
        self._bad: tuple[int, float] | None = None
        self._step, self._first_shard, self._turn, self._named = 0, 0, 0, ""
        self._begun_at: int | None = None  # the loop's first step here
        self._follow()

    def abandon(self) -> None:
        """Leave a step that cannot be finished. Collective."""
        self._bound.remove_placeholders()
        self._bound.clear_gradients()
        self._pending.losses.clear()

    def begin(self, step: int, first_shard: int) -> None:
        """Start a step.

        Args:
            step: counted over the whole run.
            first_shard: the first one that has samples in this step.
        """
        self._step, self._first_shard = step, first_shard
        self._begun_at = step if self._begun_at is None else self._begun_at
        self.begin_update(list(self.members.values()), 0)
        self._team.faults.meet("begin", step)
        self.timers.begin()

    def begin_update(self, members: list[Member], turn: int) -> None:
        """Begin one of the step's updates: passes whose gradients are for some of the optimizers.

        Args:
            turn: how many updates the step has had.
        """
        self._active, self._turn, self._scaling = members, turn, members[0].scaling
        self.is_skipped, self.gradient_norm = False, None
        self._named = f"of step {self._step}"
        if turn or len(members) < len(self.members):  # shorter, as meetings have 24 letters
            self._named = f"{self._step}.{turn} {'+'.join(member.name for member in members)}"
        self.begin_again()

    def begin_again(self) -> None:
        """Be ready for the passes of all shards, maybe once more; maybe others compute them now."""
        if self.exchange.division.is_outdated:
            self.exchange.divide()
            self._follow()
        self._bound.begin(self._step)
        others: Sequence[int] = ()
        if len(self._active) < len(self.members):
            active = {index for member in self._active for index in member.parameters}
            others = [at for at in range(len(self.exchange.parameters)) if at not in active]
        self.passes.begin(self._step, self._first_shard, self._turn, others)
        self._pending.losses.clear()
        self.per_sample.clear()

    def begin_passes(self) -> Sequence[int]:
        """Give this worker's shards; collectives are refused until :meth:`end_passes`."""
        if len(self._active) > 1 and any(member.scaling for member in self._active):
            raise ValueError(
                "losses are scaled for one optimizer at a time where `scaler` is given, but "
                "this update is of several: compute each loss in an update of its own, such as "
                f"`with step.update({self._active[0].name!r}):`."
            )
        if self._watches_program or self._bound.looks_closely:
            self._take_changes()
        if self._compares:
            is_due = (
                self._step - (self._begun_at or 0) < _COMPARED or self._step % _COMPARED_EVERY == 0
            )
            self._records.seen = self.exchange.replica() if is_due else 0
        number = self._options.note()
        # Where the leader alone updates, its options alone count.
        self._records.options = number if self.exchange.have_all else 0
        forbid(IN_A_PASS)
        return self.passes.shards

    def _take_changes(self) -> None:
        """Take over what the program has changed since the last update. Collective, if it has."""
        self._bound.check_groups()
        self.exchange.take_changes()
        self._bound.remember()
        if self.exchange.division.is_outdated:  # somebody was lost there
            self.exchange.divide()
            self._follow()
        elif self.exchange.is_state_new:
            for member in self.members.values():
                member.follow(self.exchange)
        self.exchange.is_state_new = False

    def end_passes(self) -> None:
        """Allow collectives again."""
        forbid("")

    def pass_again(self) -> None:
        """Be ready for second passes of all shards, with the parameters of the first ones."""
        self._bound.check_untouched()
        self._options.check()
        self.begin_again()

    def start_shard(self, shard: int) -> None:
        """Prepare for one shard's forward pass, once it has been read."""
        self.timers.lap(Phase.LOADING)
        self._team.faults.meet("shard", self._step)
        self.passes.start(shard)
        self._bound.remove_placeholders()

    def repeat_shard(self, shard: int) -> None:
        """Prepare for one shard's passes once more, in a step that fails."""
        self._bound.clear_gradients()
        self.passes.start(shard)

    def finish_shard(self, shard: int, returned: Any, num_samples: int, share: float) -> None:
        """Differentiate one shard's loss and take its gradients.

        Args:
            returned: what the loss function returned.
            share: the shard's part of the global batch's samples, the weight of a mean.

        Raises:
            TypeError: `returned` is no loss.
            RuntimeError: something else has called ``backward``.
            ValueError: the loss is no scalar, or depends on no parameter.
        """
        self.timers.lap(Phase.FORWARD)
        loss = read_loss(returned, num_samples)
        self._bound.check_gradients()
        if loss.per_sample:
            self.per_sample[shard] = loss.per_sample
        if self._device.is_host:
            self._records.write(shard, loss)
        else:
            self._pending.losses.append((shard, loss))
        backward = None
        # Everybody will read a bad record and raise the same error; nobody updates anything.
        if self._scaling is not None or not is_known_bad(loss):
            check_differentiable(loss)
            backward = self._weighted(loss, share)
        self.passes.add(shard, backward)
        self._bound.set_placeholders()
        self.timers.lap(Phase.BACKWARD)

    def differentiate_again(self, returned: Any, num_samples: int, share: float) -> None:
        """Differentiate one shard's loss in a step that fails; gradients stay in ``.grad``."""
        self._device.backward(*self._weighted(read_loss(returned, num_samples), share))

    def check_passes(self) -> None:
        """Check what no pass may change; raises RuntimeError."""
        self._bound.check_passes()
        self._options.check()
        if self._bound.looks_closely and (name := self.exchange.changed_name()):
            raise changed_in_a_pass(name)

    def clear_repeated(self) -> None:
        """Leave gradients and buffers as they were before shards were computed once more."""
        self._bound.clear_gradients()
        self.exchange.buffers.restore()

    def skip_shard(self, shard: int) -> None:
        """Take into account that a shard has no samples in this step."""
        self.passes.skip(shard)
        self._records.write(shard, None)

    def arrive(self) -> Sequence[int] | None:
        """Meet the others once the own shards are done. Collective.

        Returns:
            None when the shards of the whole step are done. Else somebody was lost, and these are
            to be computed here too, maybe none; then this is called again.
        """
        step = self._step
        self.check_passes()
        self._team.faults.meet("gradients", step)
        # Here, and nowhere else in a plain step, the host waits for the device.
        if self._pending.losses:
            for shard, loss in self._pending.read():
                self._records.write(shard, loss)
        more = self._wait(Phase.BACKWARD, self.exchange.gather, f"gradients {self._named}")
        if more is None:
            if self._copied is not None:
                self.exchange.memory.snapshots.complete(self._copied)
                self._copied = None
            self._read = self._records.read()
            self._bad = non_finite_shard(self._read)
            if self._compares:
                self.exchange.check_replicas({record.seen for record in self._read} - {0})
            self._bound.set_placeholders()  # also where no shard of this worker's had samples
            self.passes.leave_shards()
            return None
        # The snapshot is not known to be whole; the one before it still is.
        self._copied = None
        # Now, while nobody updates: what it reads of the optimizer's state must be this step's.
        for member in self.members.values():
            member.follow(self.exchange)
        return self.passes.take_over(more)

    @property
    def has_rows(self) -> bool:
        """Whether shards have values per sample, the same on every worker; once all are done."""
        return bool(self._read[self._first_shard].has_rows)

    @property
    def failing_shard(self) -> int | None:
        """The first shard whose loss lets the step fail, as it is not finite; once all are done."""
        if self._bad is None or (self._scaling is not None and self._scaling.scale > SMALLEST):
            return None
        return self._bad[0]

    def finish(self) -> tuple[dict[str, float], bool]:
        """Sum and update. Collective: every rank calls it once the step's shards are done.

        Returns:
            The means by name, and whether the step is done; if not, somebody was lost in the midst
            of the update, and :meth:`go_back` must be called.

        Raises:
            NonFiniteLossError: the loss of a shard is NaN or infinite, or, where losses are scaled,
                gradients are with any scale; nothing was updated.
            RuntimeError: something else changed the parameters meanwhile.
        """
        totals, present = self._sum()
        if present is None:
            return totals.means, False
        self._team.faults.meet("update", self._step)
        if self.exchange.homes is None:
            self.passes.seed("update")  # a whole update may draw
        before = forbid(IN_AN_UPDATE)  # one worker may do it for all
        try:
            for member in self._active:
                if self.is_skipped:
                    pass_for_stepped(member.optimizer)
                else:
                    member.update.apply(present)
        finally:
            forbid(before)
        return totals.means, self._settle()

    def _sum(self) -> tuple[StepTotals, Sequence[bool] | None]:
        """Sum gradients, scale and clip them. Collective.

        Returns:
            The sums of records, and for each parameter, whether it has a gradient in this step;
            None: somebody was lost.

        Raises:
            NonFiniteLossError, RuntimeError: as :meth:`finish` does.
        """
        exchange, step = self.exchange, self._step
        self._bound.check_untouched()
        self._bound.remove_placeholders()
        records, bad = self._read, self._bad
        if bad is not None and self._scaling is None:
            self._team.meet(f"bad loss {self._named}")
            shard, value = bad
            raise self._after_nothing(non_finite(value, step, shard))
        totals = self._records.totals(records)
        if exchange.is_lost:
            return totals, None
        self._team.faults.meet("sums", step)
        present = exchange.add_up(f"sums {self._named}")
        if len(self.members) > 1:
            self._check_present(present)
        self.present = present
        if totals.is_sum:
            self._divide_sums(present, totals.weight)
        if self._scaling is not None and not self._unscale(self._scaling, present, bad):
            return totals, None
        if self._hook is not None and not self.is_skipped:
            self.passes.seed("gradients")
            self._hook.call(step, exchange.whole, present)
        if self._clips and not self._clip(present, step):
            return totals, None
        self.timers.lap(Phase.SUMMING)
        if exchange.homes is None and not self._wait(
            Phase.SUMMING, exchange.all_sums, f"sums {self._named}"
        ):
            return totals, None
        return totals, present

    def _settle(self) -> bool:
        """Make the update everybody's. Collective.

        Returns:
            Whether it is; False if somebody was lost in the midst of it.
        """
        exchange, step = self.exchange, self._step
        self._team.faults.meet("updated", step)
        if not self._wait(Phase.UPDATING, exchange.share, f"update {self._named}"):
            return False
        for member in self._active:
            member.update.commit()
        self.passes.commit()
        if self._scaling is not None:
            self._scaling.update(is_skipped=self.is_skipped)
        self._bound.remember()
        self.passes.seed("between")
        self.timers.lap(Phase.UPDATING)
        self._team.faults.meet("commit", step)
        return True

    def take_snapshot(
        self,
        step: int,
        describe: Callable[[], tuple[Mapping[str, Any], Mapping[str, torch.Tensor]]],
        *,
        wait: bool,
    ) -> int | None:
        """Copy the whole state. Collective, between two steps.

        Args:
            step: the next one.
            describe: gives `facts` and `tensors` of :meth:`Exchange.save`, on the leader alone.
            wait: meet the others, so that it is whole when this returns; else it is after the
                next step's shards are done.

        Returns:
            The slot; None if meanwhile the leader was lost with what it alone had.
        """
        while not self.exchange.is_lost:
            facts, tensors = describe() if self._team.leads_host else ({}, {})
            slot = self.exchange.save(facts, tensors)
            self._team.faults.meet("snapshot", step)
            if not wait:
                self._copied = slot
                return slot
            if self._team.meet("snapshot"):
                self.exchange.memory.snapshots.complete(slot)
                return slot
        return None

    def go_back(self) -> None:
        """Put back what the exchange has of the newest snapshot. Collective."""
        self._copied = None
        self._bound.clear_gradients()
        self.exchange.load()
        self._bound.remember()
        self._follow()

    def _after_nothing(self, error: NonFiniteLossError) -> NonFiniteLossError:
        """Leave buffers as the step found them, the same on every worker, before it fails."""
        self.exchange.buffers.restore()
        return error

    def _follow(self) -> None:
        """Be ready for what is this worker's now."""
        self.passes.divide()
        for member in self.members.values():
            member.follow(self.exchange)

    def _weighted(self, loss: ShardLoss, share: float) -> Backward:
        """Give what to differentiate, and by which factor its gradient counts."""
        tensor = loss.tensor if self._scaling is None else self._scaling.scaled(loss.tensor)
        return tensor, torch.full_like(tensor, 1.0 if loss.is_sum else share)

    def _divide_sums(self, present: Sequence[bool], weight: float) -> None:
        """Turn sums into means over the true weight."""
        for totals in self._device.groups(self._totals(present)):
            torch._foreach_div_(totals, weight)

    def _unscale(
        self, scaling: LossScaling, present: Sequence[bool], bad: tuple[int, float] | None
    ) -> bool:
        """Unscale this worker's pieces, and find out whether all skip the step. Collective.

        Returns:
            Whether all have; False if somebody was lost.
        """
        step = self._step
        groups = self._device.groups(self._totals(present))
        are_finite = [scaling.unscale(totals) for totals in groups]
        mine = b"finite" if all(are_finite) else b""
        vote = functools.partial(self.exchange.agree, mine)
        heard = self._wait(Phase.SUMMING, vote, f"scale {self._named}")
        if heard is None:
            return False
        self.is_skipped = not all(heard)
        if self.is_skipped and scaling.scale <= SMALLEST:
            sums = zip(self.exchange.pieces, self.exchange.totals, strict=True)
            names = self._not_finite((p.index, total) for p, total in sums if present[p.index])
            raise self._after_nothing(non_finite_unscaled(scaling.scale, step, bad, names))
        return True

    def _clip(self, present: Sequence[bool], step: int) -> bool:
        """Clip this worker's pieces of the gradients. Collective.

        Returns:
            Whether all have; False if somebody was lost.
        """
        whole = [member for member in self._active if member.clipping.norm is not None]
        if self.is_skipped:
            self.gradient_norm = math.inf if whole else None
            return True
        for member in self._active:
            if member.clipping.value is not None:
                for totals in self._device.groups(self._totals(present, member.parameters)):
                    member.clipping.clip_values(totals)
        if not whole:
            return True
        if not self._wait(Phase.SUMMING, self.exchange.all_sums, f"sums {self._named}"):
            return False
        sums = self.exchange.whole
        norms = [total_norm([sums[at] for at in one.parameters if present[at]]) for one in whole]
        self.gradient_norm = math.hypot(*map(torch.Tensor.item, norms))
        error = None
        if not math.isfinite(self.gradient_norm):  # now, while the sums are to be read
            bad = self._not_finite((at, sums[at]) for at in range(len(sums)) if present[at])
            error = non_finite_norm(self.gradient_norm, step, bad)
        if not self._wait(Phase.SUMMING, self.exchange.are_read, f"norm {self._named}"):
            return False
        if error is not None:
            raise self._after_nothing(error)
        for member, norm in zip(whole, norms, strict=True):
            for totals in self._device.groups(self._totals(present, member.parameters)):
                member.clipping.scale(totals, norm.to(totals[0].device))
        return True

    def _not_finite(self, gradients: Iterable[tuple[int, torch.Tensor]]) -> tuple[str, ...]:
        """Name the parameters whose summed gradients, by their positions, are not finite."""
        names = list(updated_parameters(self.model, self._optimizer))
        bad = {at for at, total in gradients if not bool(torch.isfinite(total).all())}
        return tuple(names[at] for at in sorted(bad))

    def _check_present(self, present: Sequence[bool]) -> None:
        """Refuse an update of several that has no gradients of its own."""
        for member in self._active:
            if not any(present[index] for index in member.parameters):
                raise ValueError(
                    f"the loss of an update must depend on the parameters that it changes, but in "
                    f"step {self._step} none of {member.name!r} has a gradient: compute it with "
                    f"them, without `detach()` or `torch.no_grad()`, or name another optimizer."
                )

    def _wait(self, phase: Phase, meet: Callable[[str], Met], purpose: str) -> Met:
        """Meet the others; the time before is that of `phase`, the rest that of waiting."""
        self.timers.lap(phase)
        met = meet(purpose)
        self.timers.lap(Phase.WAITING)
        return met

    def _totals(
        self, present: Sequence[bool], own: Container[int] | None = None
    ) -> list[torch.Tensor]:
        """View this worker's pieces of the summed gradients that are there.

        What has no dimensions has none here either: by a scalar of a wider dtype, such as the norm,
        torch multiplies it in that dtype, but a vector in its own.

        Args:
            present: for each parameter, whether it has a gradient.
            own: which parameters; None: all.
        """
        exchange = self.exchange
        return [
            total if exchange.parameters[piece.index].ndim else total.view(())
            for total, piece in zip(exchange.totals, exchange.pieces, strict=True)
            if present[piece.index] and (own is None or piece.index in own)
        ]
