"""The passes over one worker's shards, one after the other on its one device.

::

    begin           the buffers are those that every shard starts from
    start(shard)    generators and buffers are ready for its forward pass
    add(shard)      its loss is differentiated, and its gradients are added to a part
    finished        the parts that are done and not yet given
    commit          what the update has led to is that of every model

A step asks for no more. With several devices (``several_devices.py``) each has a range of the
shards and a copy of the model.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch
from torch import nn

from unisono.device import Device
from unisono.exchange.buffers import Buffers
from unisono.exchange.protocol import Exchange
from unisono.plan.seeds import seed_of
from unisono.plan.summation import Node
from unisono.step.crossings import cross
from unisono.step.gradients import Gradients, GradientStack
from unisono.step.placeholders import another_backward

Backward = tuple[torch.Tensor, torch.Tensor]
"""A loss, and its weight."""

Finished = tuple[Node, Gradients]
"""A part, and its sums."""


class DeviceReplica:
    """One of a worker's replicas of the model. Final.

    Args:
        device: where it is.
        model: the user's on the first device, a copy of it on the others.
        parameters: those that the optimizer updates, in the exchange's order.
        fixed: those that it does not.

    Attributes:
        stack: the sums of the step under way.
        others: those of `parameters` that stay as they are in this update, as they belong to other
            optimizers: their gradients are dropped.
        done: the parts that are finished in this step and wait for those of other devices.
    """

    def __init__(
        self,
        device: Device,
        model: nn.Module,
        parameters: Sequence[nn.Parameter],
        fixed: Sequence[nn.Parameter],
        buffers: Buffers,
    ) -> None:
        self.device, self.model, self.buffers = device, model, buffers
        self.parameters, self.fixed = parameters, fixed
        self.others: Sequence[nn.Parameter] = ()
        self._copies = device.copies()
        self.begin([])

    def begin(self, parts: Sequence[Node]) -> None:
        """Start to compute some parts."""
        self.stack = GradientStack(self.parameters, parts)
        self.done: dict[Node, Gradients] = {}

    def push(self, shard: int) -> Finished | None:
        """Take the gradients that the backward pass of a shard has left."""
        for parameter in self.others:
            parameter.grad = None
        finished = self.stack.push(shard)
        for parameter in self.fixed:
            parameter.grad = None
        return finished

    def clear_gradients(self) -> None:
        """Have the next backward pass allocate every gradient."""
        for parameter in (*self.parameters, *self.fixed):
            parameter.grad = None

    def has_gradients(self) -> bool:
        """Tell whether a backward pass has left gradients."""
        return any(p.grad is not None for p in (*self.parameters, *self.fixed))

    def check_gradients(self) -> None:
        """Refuse gradients that another backward pass than ours has left."""
        if self.has_gradients():
            raise another_backward()

    def gradient_bytes(self, device: Device) -> int:
        """What gradients take while a backward pass is under way, beside published parts."""
        one_set = sum(parameter.nbytes for parameter in self.parameters if device.has(parameter))
        return one_set * (1 + self.stack.depth + len(self.done))

    def brought(self, part: Node, home: Device) -> Gradients:
        """Take the gradients of a finished part, on another device."""
        gradients = self.done.pop(part)
        if home.is_host or home is self.device:
            return gradients
        there = [g for g in gradients if g is not None]
        here = [torch.empty_like(g, device=home.torch) for g in there]
        cross([self._copies], [here], there)
        arrived = iter(here)
        return [None if g is None else next(arrived) for g in gradients]


class ShardPasses:
    """Computes the shards of one worker in the steps of one loop.

    Args:
        model: the user's, as `exchange` has bound it.
        exchange: knows the first device alone.

    Attributes:
        home: the first device with the user's model.
        shards: those of this worker, in the order in which it computes them.
        devices: by shard, which of this worker's devices computes it, whosever shard it is.
        others: the devices of this worker beside the exchange's.
        is_waiting: whether a loss is to be differentiated together with others that are to come.
    """

    shards: Sequence[int]
    others: Sequence[Device] = ()
    is_waiting = False

    def __init__(self, model: nn.Module, exchange: Exchange, seed: int) -> None:
        self._model, self._exchange, self._seed = model, exchange, seed
        self._device, self._num_shards = exchange.device, exchange.division.num_shards
        self.home = DeviceReplica(
            exchange.device, model, exchange.parameters, exchange.fixed, exchange.buffers
        )
        self._replicas = [self.home]
        self._step = self._first_shard = self._turn = 0
        self.devices = dict.fromkeys(range(self._num_shards), exchange.device)

    def divide(self) -> None:
        """Be ready for what is this worker's now."""
        division = self._exchange.division
        self.shards = division.shards
        self.home.begin(division.mine)

    def take_over(self, parts: Sequence[Node]) -> Sequence[int]:
        """Be ready for parts that a lost worker has left; gives their shards in order."""
        self.home.begin(parts)
        return [shard for part in parts for shard in range(part.lo, part.hi)]

    def begin(self, step: int, first_shard: int, turn: int = 0, others: Sequence[int] = ()) -> None:
        """Be ready for the passes of an update; what one before has not finished is forgotten.

        Args:
            step: counted over the whole run.
            first_shard: the first one that has samples; the buffers that it leaves are kept.
            turn: how many updates the step has had.
            others: the positions of parameters that stay as they are.
        """
        self._step, self._first_shard, self._turn = step, first_shard, turn
        self.home.others = [self.home.parameters[index] for index in others]
        self.home.buffers.begin()
        self.home.stack.discard()

    def begin_passes(self, sizes: Sequence[int]) -> None:
        """Be told how many samples each shard of the step has."""

    def end_passes(self) -> None:
        """Compute nothing more in this step."""

    def seed(self, stream: str) -> None:
        """Seed generators for what is computed once in the update."""
        self._device.seed(seed_of(stream, self._seed, self._step, self._turn))

    @contextmanager
    def seeded(self, stream: str) -> Iterator[None]:
        """Seed generators likewise, and put them back after it."""
        with self._device.generators_put_back():
            self.seed(stream)
            yield

    def start(self, shard: int) -> nn.Module:
        """Prepare for one shard's forward pass; gives the model that computes it."""
        self._start(self.home, shard)
        return self._model

    def repeat(self, shard: int) -> nn.Module:
        """Prepare for one shard's passes once more, in a step that will fail; see :meth:`start`."""
        return self.start(shard)

    def add(self, shard: int, backward: Backward | None) -> Finished | None:
        """Take a shard's loss, once its forward pass is issued.

        Args:
            backward: what to differentiate; None: nothing, as the loss is not finite.

        Returns:
            A part that is finished by it; None: none is, or :meth:`finished` gives it.
        """
        exchange, stack = self._exchange, self.home.stack
        if backward is None:
            return stack.push_nothing(shard)
        if shard != stack.last_shard or not exchange.takes_early:
            self._device.backward(*backward)
        else:
            with published_early(exchange.parameters, stack, exchange, self.home.others):
                self._device.backward(*backward)
        finished = self.home.push(shard)
        if shard == self._first_shard:
            exchange.buffers.keep()
        return finished

    def skip(self, shard: int) -> Finished | None:
        """Take into account that a shard has no samples in this step; returns as :meth:`add`."""
        return self.home.stack.push_nothing(shard)

    def finished(self) -> Iterable[Finished]:
        """Give parts that are still to be given, once all passes are issued, before an update."""
        return ()

    def commit(self, present: Sequence[bool]) -> None:
        """Finish a step, or an evaluation within it, once its update is everybody's.

        Args:
            present: for each parameter, whether it has a gradient in this step.
        """
        self._exchange.buffers.commit()

    def drop(self) -> None:
        """Forget copies of the model; the next step makes others."""

    def found_in(self, error: BaseException, shard: int | None) -> tuple[Device, int | None]:
        """Say on which device, and in which shard's pass, torch has raised an error.

        Args:
            shard: whose pass was issued last; None: outside of passes.
        """
        return self._device, shard

    def computed_with(self, shard: int) -> Sequence[int]:
        """List the shards whose losses are differentiated together with that of one."""
        return [shard]

    def replica_on(self, device: Device) -> DeviceReplica:
        """Give the replica of a device; the first one where there is none yet."""
        return next((r for r in self._replicas if r.device is device), self.home)

    def _start(self, replica: DeviceReplica, shard: int) -> None:
        place = self._step * self._num_shards + shard
        replica.device.seed(seed_of("train", self._seed, place, self._turn))
        replica.buffers.restore()


@contextmanager
def published_early(
    parameters: Sequence[torch.nn.Parameter],
    stack: GradientStack,
    exchange: Exchange,
    others: Sequence[torch.nn.Parameter] = (),
) -> Iterator[None]:
    """Publish each gradient that the backward pass in the block leaves, summed over the last part.

    Bytes travel while the rest is still computed. Hooks are set before that pass and removed after
    it, so they come behind all hooks of the program.

    Args:
        parameters: those that the optimizers update.
        stack: has the shards before this one, which is the last.
        others: those of `parameters` that stay as they are in this update.
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
