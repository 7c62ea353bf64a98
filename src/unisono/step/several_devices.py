"""The shards of one worker on several devices: a replica of the model on each.

::

    device 0   forward ┐                ┌ backward, add to a part ┐
    device 1   forward ┼ autograd's own ┼ backward, add to a part ┼ … parts come to device 0, where
    device 2   forward ┘ threads, at    └ backward, add to a part ┘   the worker's are finished
                         the same time
    update     on device 0; what it has changed is copied to the others beside the next step

The first device is the home: its replica is the user's model, and the exchange, the optimizer,
snapshots and digests know no other. Sums are the same tree's as on one device, so bits are, too.

On CPUs one thread computes all: each loss is differentiated before the next shard, as on one.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import nn
from torch.optim import Optimizer

from unisono.device import Device, HostGenerators
from unisono.exchange.buffers import Buffers
from unisono.exchange.protocol import Exchange
from unisono.plan.rounds import as_whole, divide, parts_among, rounds_of, within
from unisono.plan.summation import Node, tree_sum
from unisono.state.model_copies import ModelCopies
from unisono.state.optimizers import changes_what_has_gradients
from unisono.step.crossings import cross
from unisono.step.device_replica import DeviceReplica
from unisono.step.gradients import Gradients, add_gradients

_LOOKED_THROUGH_AT_FIRST = 2  # steps

Backward = tuple[torch.Tensor, torch.Tensor]
"""A loss, and its weight."""


class _Computed(NamedTuple):
    """A shard whose forward pass is issued; `drawn`: what it has left of the host's generators."""

    shard: int
    backward: Backward | None
    drawn: HostGenerators | None


class SeveralDevices:
    """What one worker's devices compute in the steps of one loop. Final.

    Args:
        model, optimizer: the user's, as `exchange` has bound them.
        exchange: knows the first device alone.
        others: the other devices.

    Attributes:
        shards: those of this worker, in the order in which it computes them.
        is_at_home: whether the first device computes whatever comes now, as in an audit.

    Raises:
        ValueError: the optimizer updates what is no part of the model.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        exchange: Exchange,
        others: Sequence[Device],
    ) -> None:
        check_within(model, exchange.parameters)
        self._model, self._optimizer, self._exchange = model, optimizer, exchange
        self._home = DeviceReplica(
            exchange.device, model, exchange.parameters, exchange.fixed, exchange.buffers
        )
        self._others, self._copies = others, [exchange.device.copies() for _ in others]
        self._replicas = [self._home]
        self._model_copies: ModelCopies | None = None
        self._computes_in_turn = exchange.device.is_host
        self._computed: list[_Computed] = []
        self._num_steps = 0
        self.is_at_home = False
        self.divide()

    @property
    def _further(self) -> list[DeviceReplica]:
        return self._replicas[1:]

    def divide(self) -> None:
        """Divide what is this worker's now among its devices."""
        division = self._exchange.division
        self._assign(division.shards, division.mine)

    def take_over(self, parts: Sequence[Node]) -> list[int]:
        """Divide parts that a lost worker has left; gives their shards in the order to compute."""
        self._assign([shard for part in parts for shard in range(part.lo, part.hi)], parts)
        self._begin_parts()
        self.begin_passes(self._sizes)
        return self.shards

    def begin(self) -> None:
        """Start a step: the copies are as the model is."""
        self._num_steps += 1
        self.is_at_home = False
        if self._model_copies is None:
            self._make()
        else:
            self._model_copies.follow()
        for replica in self._further:
            replica.buffers.begin_as(self._home.buffers)
            replica.clear_gradients()
        self._begin_parts()

    def begin_passes(self, sizes: Sequence[int]) -> None:
        """Be told how many samples each shard of the step has."""
        self._sizes = sizes
        rounds = [[shard for shard in each if sizes[shard]] for each in self._rounds]
        self._ends_of_rounds = {each[-1] for each in rounds if each}

    def end_passes(self) -> None:
        """Compute nothing more in this step."""
        self._home.device.use()

    def device_of(self, shard: int) -> Device:
        """Say which device computes a shard."""
        at = self._place(shard)
        return self._others[at - 1] if at else self._home.device

    def start(self, shard: int, seed: int) -> nn.Module:
        """Prepare for one shard's forward pass; gives the model that computes it."""
        replica = self._replicas[self._place(shard)]
        replica.start(seed)
        if not self._computes_in_turn:
            self._seeded = HostGenerators.now()
        return replica.model

    def repeat(self, shard: int, seed: int) -> nn.Module:
        """Prepare for one shard's passes once more, in a step that will fail; see :meth:`start`."""
        self._computed.clear()
        for replica in self._replicas:
            replica.clear_gradients()
        return self.start(shard, seed)

    def add(self, shard: int, backward: Backward | None) -> Sequence[int]:
        """Take a shard's loss, once its forward pass is issued.

        Args:
            shard: which.
            backward: what to differentiate; None: nothing, as the loss is not finite.

        Returns:
            The shards that are differentiated now; none if some of the same round are to come.
        """
        for replica in self._further:
            replica.check_gradients()
        if backward is not None and self._num_steps <= _LOOKED_THROUGH_AT_FIRST:
            self._check_graph(shard, backward[0])
        drawn = None
        if not (self._computes_in_turn or self._seeded.are_now()):
            drawn = HostGenerators.now()
        self._computed.append(_Computed(shard, backward, drawn))
        is_last = self._computes_in_turn or shard in self._ends_of_rounds
        return self._differentiate() if is_last else ()

    def skip(self, shard: int) -> None:
        """Take into account that a shard has no samples in this step."""
        self._replicas[self._place_of[shard]].push_nothing(shard)

    def keep_buffers(self, shard: int) -> None:
        """Publish the buffers that a shard has left."""
        replica = self._replicas[self._place_of[shard]]
        if replica is not self._home:
            replica.buffers.give_to(self._home.buffers)
        self._home.buffers.keep()

    def finished(self) -> Iterator[tuple[Node, Gradients]]:
        """Finish this worker's parts, once the passes of all its shards are issued."""
        done = {node: replica for replica in self._replicas for node in replica.done}
        for part in self._parts:
            nodes = within(part, list(done))
            values = [done[node].brought(node, self._home.device) for node in nodes]
            yield part, tree_sum(values, add_gradients, as_whole(part, nodes))

    def before_update(self) -> None:
        """Have parameters changed only after the copies of what they were are made."""
        for copies in self._copies:
            copies.before_changes()

    def update(self, present: Sequence[bool]) -> None:
        """Give the copies what the optimizer has changed.

        Args:
            present: for each parameter, whether it has a gradient in this step.
        """
        if changes_what_has_gradients(self._optimizer):
            changed = [at for at, is_there in enumerate(present) if is_there]
            self._send([[replica.parameters[at] for at in changed] for replica in self._replicas])
        else:
            self._send([[*replica.parameters, *replica.fixed] for replica in self._replicas])

    def found_in(self, error: BaseException, shard: int | None) -> tuple[Device, int | None]:
        """Say where an error comes from that torch raises for passes of several devices.

        Args:
            error: torch names the device that it is about, if it is about one.
            shard: whose pass was issued last; None: outside of passes.

        Returns:
            The device, and the shard that it computes now.
        """
        named = re.search(rf"\b(?:GPU |{self._home.device.torch.type}:)(\d+)", str(error))
        devices = [self._home.device, *self._others]
        for at, device in enumerate(devices):
            if named is not None and device.torch.index == int(named[1]):
                others = next((each for each in self._rounds if shard in each), [])
                return device, next((v for v in others if self._place_of[v] == at), None)
        return self._home.device if shard is None else self.device_of(shard), shard

    def computed_with(self, shard: int) -> list[int]:
        """List the shards whose losses are differentiated together with that of one."""
        rounds = [] if self._computes_in_turn or self.is_at_home else self._rounds
        return next((each for each in rounds if shard in each), [shard])

    def replica_on(self, device: Device) -> DeviceReplica:
        """Give the replica of a device; the first one where there is none yet."""
        return next((r for r in self._replicas if r.device is device), self._home)

    def drop(self) -> None:
        """Forget the copies; the next step makes others."""
        self._replicas, self._model_copies = [self._home], None
        self._computed = []
        self._home.begin([])
        self._home.device.use()

    def _place(self, shard: int) -> int:
        return 0 if self.is_at_home else self._place_of.get(shard, 0)  # maybe of a lost worker

    def _assign(self, shards: Sequence[int], parts: Sequence[Node]) -> None:
        self._parts = parts
        self._divided = divide(shards, 1 + len(self._others))
        self._rounds = rounds_of(self._divided)
        self._place_of = {shard: at for at, own in enumerate(self._divided) for shard in own}
        self.shards = [shard for each in self._rounds for shard in each]

    def _begin_parts(self) -> None:
        self._computed = []
        num_shards = self._exchange.division.num_shards
        for replica, own in zip(self._replicas, self._divided, strict=True):
            replica.begin(parts_among(own, num_shards))

    def _make(self) -> None:
        self._model_copies = ModelCopies(self._model, [d.torch for d in self._others])
        for device, model in zip(self._others, self._model_copies.models, strict=True):
            own = dict(zip(map(id, self._model.parameters()), model.parameters(), strict=True))
            buffers = Buffers(model, device, device.copies())
            buffers.bind_beside()
            parameters = [own[id(parameter)] for parameter in self._home.parameters]
            fixed = [own[id(p)] for p in self._home.fixed if id(p) in own]
            self._replicas.append(DeviceReplica(device, model, parameters, fixed, buffers))

    def _differentiate(self) -> list[int]:
        computed, self._computed = self._computed, []
        losses = [each.backward for each in computed if each.backward is not None]
        if any(each.drawn is not None for each in computed):
            # A backward pass may draw from them, too, where its own forward pass has left them.
            for each in computed:
                if each.drawn is not None:
                    each.drawn.put_back()
                if each.backward is not None:
                    torch.autograd.backward(*each.backward)
        elif losses:
            torch.autograd.backward([loss for loss, _ in losses], [weight for _, weight in losses])
        for each in computed:
            self._take(each)
        return [each.shard for each in computed]

    def _take(self, computed: _Computed) -> None:
        replica = self._replicas[self._place_of[computed.shard]]
        if computed.backward is None:
            replica.push_nothing(computed.shard)
            return
        if not replica.has_gradients():
            self._check_graph(computed.shard, computed.backward[0])
        replica.push(computed.shard)

    def _check_graph(self, shard: int, loss: torch.Tensor) -> None:
        """Refuse a loss that another replica's parameters had a part in."""
        own = self._place_of[shard]
        others = {
            id(parameter)
            for at, replica in enumerate(self._replicas)
            if at != own
            for parameter in (*replica.parameters, *replica.fixed)
        }
        if any(id(leaf) in others for leaf in leaves_of(loss)):
            raise RuntimeError(
                f"with `devices=`, a loss must be computed with the model that it is given, one on "
                f"each device, but the loss of shard {shard}, on {self.device_of(shard).name}, "
                f"depends on the parameters of another one: use the function's argument `model`, "
                f"or `step.model` in a loop of your own, and not a model from outside."
            )

    def _send(self, tensors: Sequence[Sequence[torch.Tensor]]) -> None:
        source, *into = tensors
        with torch.no_grad():
            cross(self._copies, into, source)


def check_within(model: nn.Module, parameters: Sequence[nn.Parameter]) -> None:
    """Refuse parameters that have no copy on further devices.

    Raises:
        ValueError: one is no part of the model.
    """
    own = set(map(id, model.parameters()))
    outside = [tuple(parameter.shape) for parameter in parameters if id(parameter) not in own]
    if outside:
        raise ValueError(
            f"with `devices=`, the optimizer must update parameters of the model, of which each "
            f"device has a copy, but updates another one of shape {outside[0]}: make it part of "
            f"the model, and have the loss take it from there."
        )


def leaves_of(loss: torch.Tensor) -> Iterator[torch.Tensor]:
    """Find the tensors whose gradients a backward pass accumulates."""
    waiting, seen = [loss.grad_fn], set()
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if isinstance(leaf := getattr(node, "variable", None), torch.Tensor):
            yield leaf
        waiting += [before for before, _ in node.next_functions]
