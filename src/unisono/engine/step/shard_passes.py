"""The passes over one worker's shards, one after the other.

::

    begin           the buffers are those that every shard starts from
    start(shard)    generators and buffers are ready for its forward pass
    add(shard)      its loss is differentiated, and its gradients are added to a part, which is
                    finished with its last shard
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any, final

import torch
from torch import nn

from unisono.engine.exchange.exchange import Exchange
from unisono.engine.step.combined_buffers import FIRST, CombinedBuffers
from unisono.engine.step.gradients import Gradients, GradientStack
from unisono.engine.step.loss import ShardLoss
from unisono.engine.step.loss_scaling import LossScaling
from unisono.engine.step.step_watch import StepWatch
from unisono.plan.seeds import seed_of
from unisono.plan.summation import Node
from unisono.programs.generators import OwnGenerators
from unisono.runtime.device import generator_states, set_generator_states
from unisono.runtime.training_progress import now

Finished = tuple[Node, Gradients]
"""A part, and its sums."""


@final
class ShardPasses:
    """Computes the shards of one worker in the steps of one loop.

    The program's `own` generators are seeded with the default ones. `buffers` lists how some are
    combined from all shards, by name.
    """

    watch: StepWatch | None = None  # of all loops
    scaling: LossScaling | None = None
    shards: Sequence[int]
    stack: GradientStack

    def __init__(
        self,
        exchange: Exchange,
        seed: int,
        own: OwnGenerators | None = None,
        buffers: Mapping[str, str] | None = None,
    ) -> None:
        self._exchange, self._seed = exchange, seed
        self._ways = buffers or {}
        is_any = {*self._ways.values()} - {FIRST}
        self.combined = CombinedBuffers(exchange.buffers, self._ways) if is_any else None
        self._own = own if own is not None and own.found else None
        self._device, self._num_shards = exchange.device, exchange.division.num_shards
        # of other optimizers than those of this update: their gradients are dropped
        self.others: Sequence[nn.Parameter] = ()
        self._now, self.at = now(), (0, 0, 0)
        self._step = self._first_shard = self._turn = 0
        self._look: Callable[[], object] | None = None

    @contextmanager
    def looked_at(self, look: Callable[[], object] | None) -> Iterator[None]:
        """Call `look` in the block once a shard's gradients are in ``.grad``."""
        self._look = look
        try:
            yield
        finally:
            self._look = None

    def has_way(self, name: str) -> bool:
        """Return whether the program has specified how shards combine a buffer."""
        return name in self._ways

    def divide(self) -> None:
        """Prepare for the shards that this worker has now."""
        division = self._exchange.division
        self.shards = division.shards
        self.stack = GradientStack(self._exchange.parameters, division.mine)

    def take_over(self, parts: Sequence[Node]) -> list[int]:
        """Prepare for parts of a lost worker; return their shards in order."""
        self.stack = GradientStack(self._exchange.parameters, parts)
        return [shard for part in parts for shard in range(part.lo, part.hi)]

    def begin(self, step: int, first_shard: int, turn: int = 0) -> None:
        """Prepare for the passes of an update, and discard unfinished ones.

        The buffers that `first_shard`, the first with samples, leaves are kept. `turn` is the
        number of updates in this step so far.
        """
        self._step, self._first_shard, self._turn = step, first_shard, turn
        self._exchange.buffers.begin(step)
        self.stack.discard()
        if self.combined is not None:
            self.combined.left.clear()

    def seed(self, stream: str, again: int = 0) -> None:
        """Seed generators for what an update computes once, or once more."""
        self._now.at = (*self.at, None)
        word = seed_of(stream, self._seed, self._step, self._turn + again)
        self._device.seed(word)
        if self._own is not None:
            self._own.seed(word)

    @property
    def own_generators(self) -> set[int]:
        """The IDs of the program's own generators that are seeded for each shard."""
        return set() if self._own is None else {id(own.generator) for own in self._own.found}

    def drawn(self) -> list[Any]:
        """Return the states of all generators, including the program's own."""
        own = [] if self._own is None else self._own.states()
        return [generator_states([part.torch for part in self._device.parts]), own]

    def draw_on(self, drawn: Sequence[Any] | None, step: int) -> None:
        """Restore the states of generators; if None, seed them as before `step`."""
        if not drawn:
            word = seed_of("begin", self._seed, step)
            self._device.seed(word)
            if self._own is not None:
                self._own.seed(word)
            return
        states, own = drawn
        set_generator_states(states, [part.torch for part in self._device.parts])
        if self._own is not None:
            self._own.set_states(own)

    @contextmanager
    def generators_put_back(self) -> Iterator[None]:
        """Restore all generators after the block, including the program's own."""
        own = nullcontext() if self._own is None else self._own.put_back()
        with self._device.generators_put_back(), own:
            yield

    @contextmanager
    def seeded(self, stream: str) -> Iterator[None]:
        """Seed all generators, and restore them after the block."""
        with self.generators_put_back(), self._now.put_back():
            self.seed(stream)
            yield

    def start(self, shard: int) -> None:
        """Prepare for one shard's forward pass."""
        place = self._step * self._num_shards + shard
        word = seed_of("train", self._seed, place, self._turn)
        self._device.seed(word)
        if self._own is not None:
            self._own.seed(word)
        self._exchange.buffers.restore()
        self._now.at = (*self.at, shard)

    def leave_shards(self) -> None:
        """Mark that no shard is being computed until the next one is started."""
        self._now.at = (*self.at, None)

    def repeat(self, shard: int) -> None:
        """Prepare to repeat one shard's passes, from the state that the step began with."""
        for parameter in (*self._exchange.parameters, *self._exchange.fixed):
            parameter.grad = None
        self.start(shard)

    def differentiate(self, loss: ShardLoss, share: float) -> None:
        """Compute a shard's gradients in ``.grad``; `share` is the weight of a mean."""
        tensor = loss.tensor if self.scaling is None else self.scaling.scaled(loss.tensor)
        self._device.backward(tensor, torch.full_like(tensor, 1.0 if loss.is_sum else share))

    def add(self, shard: int, loss: ShardLoss, share: float) -> Finished | None:
        """Add a shard's loss, once its forward pass is issued; see :meth:`differentiate`.

        Return the part that ends with this shard, if one does, to be published.
        """
        exchange, stack = self._exchange, self.stack
        if shard != stack.last_shard or not exchange.takes_early:
            self.differentiate(loss, share)
        else:
            with published_early(exchange.parameters, stack, exchange, self.others):
                self.differentiate(loss, share)
        return self.collect(shard)

    def collect(self, shard: int) -> Finished | None:
        """Push the gradients in ``.grad`` as a shard's, and record the buffers that it leaves."""
        exchange = self._exchange
        for parameter in self.others:
            parameter.grad = None
        if self.watch is not None:
            self.watch.differentiated(shard, exchange.parameters)
        if self._look is not None:
            self._look()
        finished = self.stack.push(shard)
        for parameter in exchange.fixed:
            parameter.grad = None
        if self.combined is not None:
            self.combined.take(shard)
        if shard == self._first_shard:
            exchange.buffers.keep()
        return finished

    def commit(self) -> None:
        """Keep the buffers that the first shard with samples has left."""
        self._exchange.buffers.commit()


@contextmanager
def published_early(
    parameters: Sequence[torch.nn.Parameter],
    stack: GradientStack,
    exchange: Exchange,
    others: Sequence[torch.nn.Parameter] = (),
) -> Iterator[None]:
    """Publish each gradient that the backward pass in the block leaves, summed over the last part.

    They are sent while the other gradients are still computed. Hooks are set before the pass and
    removed after it, so they run after all hooks of the program. `others` are not updated.
    """

    def publish(index: int, parameter: torch.Tensor) -> None:
        if parameter.grad is not None:
            part, total = stack.add_early(index, parameter.grad)
            exchange.publish_early(part, index, total)

    unwanted = set(map(id, others))
    hooks = [
        parameter.register_post_accumulate_grad_hook(partial(publish, index))  # type: ignore[no-untyped-call]
        for index, parameter in enumerate(parameters)
        if parameter.requires_grad and id(parameter) not in unwanted
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
