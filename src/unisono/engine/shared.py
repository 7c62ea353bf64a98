"""One step on the workers of one host, through shared memory.

::

    each shard      seed → buffers back → forward, backward → push        (every worker its own)
    publish         parts and rows lie in the arena
    meet            ─────────────────────────────────────────────────────
    sum, update     every worker its pieces of all parameters             (or rank 0 all)
    meet            ─────────────────────────────────────────────────────

Between the two meetings parameters change; outside of them nobody writes what another reads.
World size 1 takes the same way.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn
from torch.optim import Optimizer

from unisono.comm.team import Team
from unisono.engine import randomness
from unisono.engine.arena import Arena, Plan, lay_out
from unisono.engine.buffers import Buffers
from unisono.engine.contents import updated_parameters
from unisono.engine.gradients import GradientStack
from unisono.engine.loss import ShardLoss, check_differentiable, is_finite, non_finite
from unisono.engine.optimizers import has_hooks, is_elementwise, state_like
from unisono.engine.rows import Form, Rows, StepTotals
from unisono.engine.summing import OrderedSum
from unisono.engine.update import SlicedUpdate, StateKey, Update, WholeUpdate
from unisono.plan.seeds import seed_of
from unisono.plan.shards import assign
from unisono.plan.slices import cut
from unisono.plan.summation import parts_of


class SharedEngine:
    """Computes steps while it is bound to an arena. Final.

    Args:
        model: shared by all workers while bound.
        optimizer: the user's.
        shards: S.
        seed: the run's.
        team: the workers.
        arena: of an earlier engine of the same run, used again where its plan still holds.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        *,
        shards: int,
        seed: int,
        team: Team,
        arena: Arena | None = None,
    ) -> None:
        self._model, self._optimizer, self._team, self._seed = model, optimizer, team, seed
        world = team.world
        self._parameters = list(updated_parameters(model, optimizer).values())
        updated = set(map(id, self._parameters))
        self._fixed = [p for p in model.parameters() if id(p) not in updated]
        self._all = [*self._parameters, *self._fixed]
        self._buffers = Buffers(model)
        self._sliced = is_elementwise(optimizer)
        keys, examples = self._plan_state()
        plan = Plan(
            tuple(lay_out(self._parameters)),
            tuple(lay_out(self._fixed)),
            tuple(lay_out(examples)),
            self._buffers.slots,
            shards,
        )
        if arena is None or arena.plan != plan:
            arena = Arena(team.memory(Arena.num_bytes(plan)), plan)
        self.arena = arena
        self._share(keys)
        ranges = assign(shards, world.world_size)
        self.shards = ranges[world.rank]
        all_parts = [part for shard_range in ranges for part in parts_of(shard_range, shards)]
        self._stack = GradientStack(arena, self._parameters, parts_of(self.shards, shards))
        self._rows = Rows(arena)
        numels = [p.numel() for p in self._parameters]
        pieces = cut(numels, world.world_size)[world.rank]
        self._sum = OrderedSum(arena, all_parts, pieces)
        self._update: Update = (
            SlicedUpdate(optimizer, self._parameters, arena, keys, pieces, self._sum.totals)
            if self._sliced
            else WholeUpdate(optimizer, self._parameters, arena, acts=world.rank == 0)
        )
        self._keeper: int | None = None

    def begin(self, step: int, keeper: int) -> None:
        """Start a step whose first non-empty shard is `keeper`."""
        self._check_untouched()
        self._keeper = keeper
        self._buffers.begin()
        self._team.note_step(step)
        self._stack.discard()
        for parameter in self._all:
            parameter.grad = None

    def start_shard(self, step: int, shard: int) -> None:
        """Prepare generators and buffers for one shard's forward pass."""
        randomness.seed_generators(seed_of("train", self._seed, step, shard))
        self._buffers.restore()

    def finish_shard(self, step: int, shard: int, loss: ShardLoss, share: float) -> None:
        """Differentiate one shard's loss and take its gradients.

        Args:
            step: counted over the whole run.
            shard: which one.
            loss: what the loss function returned.
            share: the shard's part of the global batch's samples, the weight of a mean.
        """
        self._rows.write(shard, loss)
        if not is_finite(loss):
            # Everybody will read the row and raise the same error; nobody updates anything.
            self._stack.push_nothing(shard)
            return
        check_differentiable(loss)
        weight = 1.0 if loss.is_sum else share
        torch.autograd.backward(loss.tensor, torch.full_like(loss.tensor, weight))
        self._stack.push(shard)
        for parameter in self._fixed:
            parameter.grad = None
        if shard == self._keeper:
            self._buffers.keep()

    def skip_shard(self, shard: int) -> None:
        """Take into account that a shard has no samples in this step."""
        self._stack.push_nothing(shard)
        self._rows.write(shard, None)

    def finish(self, step: int) -> StepTotals:
        """Sum and update. Collective: every rank calls it once its shards are done.

        Raises:
            NonFiniteLossError: the loss of a shard is NaN or infinite; nothing was updated.
            RuntimeError: something else changed the parameters meanwhile.
        """
        self._check_untouched()
        self._team.meet(f"gradients of step {step}")
        bad = self._rows.non_finite_shard()
        if bad is not None:
            self._team.meet(f"bad loss in step {step}")
            shard, value = bad
            raise non_finite(value, step, shard)
        totals = self._rows.totals()
        present = self._sum.add()
        if totals.form == Form.SUM:
            self._divide(present, totals.weight)
        if not self._sliced:
            self._team.meet(f"sums of step {step}")
        self._update.apply(present)
        self._team.meet(f"update of step {step}")
        self._update.commit()
        self._buffers.commit()
        self._remember()
        randomness.seed_generators(seed_of("between", self._seed, step))
        return totals

    def unbind(self) -> None:
        """Give this worker's model tensors of its own again; values stay those of the last step."""
        for parameter in self._all:
            parameter.data = parameter.data.clone()
            parameter.grad = None
        for parameter in self._parameters:
            state = self._optimizer.state.get(parameter, {})
            for name, value in state.items():
                if isinstance(value, torch.Tensor):
                    state[name] = value.clone()
        self._buffers.unbind()

    def _remember(self) -> None:
        """Note the parameters' versions, which every change in place increments."""
        self._versions = [p._version for p in self._all]
        self._num_groups = len(self._optimizer.param_groups)

    def _check_untouched(self) -> None:
        """Refuse to go on after others than the optimizer have changed what all workers share."""
        if [p._version for p in self._all] != self._versions or (
            [p.data_ptr() for p in self._all] != self._places
        ):
            raise RuntimeError(
                "parameters are shared by all workers while a loop over steps is under way and "
                "must be changed by the optimizer alone, but something else changed them in place "
                "or replaced their memory: do it between two loops."
            )
        if self._sliced and has_hooks(self._optimizer):
            raise RuntimeError(
                "hooks of an optimizer's step must be there before a loop begins, but one "
                "was registered under way: register it before."
            )
        if len(self._optimizer.param_groups) != self._num_groups:
            raise RuntimeError(
                f"an optimizer must keep its parameter groups while a loop is under way, but has "
                f"{len(self._optimizer.param_groups)} instead of {self._num_groups}: add groups "
                f"between two loops."
            )

    def _plan_state(self) -> tuple[list[dict[str, StateKey]], list[torch.Tensor]]:
        """List the optimizer state of every parameter, and an example of each tensor."""
        keys: list[dict[str, StateKey]] = [{} for _ in self._parameters]
        examples: list[torch.Tensor] = []
        if not self._sliced:
            return keys, examples
        index_of = {id(parameter): index for index, parameter in enumerate(self._parameters)}
        for group in self._optimizer.param_groups:
            state_of = {
                dtype: state_like(self._optimizer, group, dtype)
                for dtype in {parameter.dtype for parameter in group["params"]}
            }
            for parameter in group["params"]:
                for name, example in sorted(state_of[parameter.dtype].items()):
                    is_array = example.numel() == 4
                    keys[index_of[id(parameter)]][name] = StateKey(len(examples), is_array)
                    like = torch.empty_like(parameter, dtype=example.dtype, device="meta")
                    examples.append(like if is_array else example.reshape(()))
        return keys, examples

    def _share(self, keys: Sequence[dict[str, StateKey]]) -> None:
        """Put rank 0's values into the arena and let every worker's model look at them."""
        is_first = self._team.world.rank == 0
        homes = [*self.arena.parameters.tensors(), *self.arena.fixed.tensors()]
        if is_first:
            with torch.no_grad():
                for home, parameter in zip(homes, self._all, strict=True):
                    home.copy_(parameter)
                self._share_state(keys)
        self._team.meet("sharing parameters")
        for home, parameter in zip(homes, self._all, strict=True):
            parameter.data = home
        self._buffers.bind(self.arena, is_first=is_first)
        self._team.meet("sharing buffers")
        self._buffers.load()
        self._places = [p.data_ptr() for p in self._all]
        self._remember()

    def _share_state(self, keys: Sequence[dict[str, StateKey]]) -> None:
        flags = bytearray(len(self._parameters) + 1)
        for index, parameter in enumerate(self._parameters):
            state = self._optimizer.state.get(parameter, {})
            there = {name for name in keys[index] if state.get(name) is not None}
            if there and there != keys[index].keys():
                raise ValueError(
                    f"an optimizer's state must fit its options, but for these it keeps "
                    f"{sorted(keys[index])} and has {sorted(there)}: clear `optimizer.state` after "
                    f"such a change, or leave the options."
                )
            if there:
                flags[index] = 1
                for name, key in keys[index].items():
                    self.arena.states.tensor(key.at).copy_(state[name])
        if self._sliced:
            self.arena.write_flags(self.arena.plan.shards, bytes(flags))

    def _divide(self, present: Sequence[bool], weight: float) -> None:
        """Turn sums into means over the true weight."""
        totals = [
            total
            for total, piece in zip(self._sum.totals, self._sum.pieces, strict=True)
            if present[piece.index]
        ]
        if totals:
            torch._foreach_div_(totals, weight)
