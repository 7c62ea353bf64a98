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
from unisono.step.gradients import add_gradients
from unisono.step.second_look import graph_of
from unisono.step.shard_passes import Backward, DeviceReplica, Finished, ShardPasses

_LOOKED_THROUGH_AT_FIRST = 2  # steps


class _Computed(NamedTuple):
    """A shard whose forward pass is issued; `drawn`: what it has left of the host's generators."""

    shard: int
    backward: Backward | None
    drawn: HostGenerators | None


class SeveralDevices(ShardPasses):
    """What one worker's devices compute. Final; see :class:`ShardPasses`.

    Args:
        model, exchange, seed: as of :class:`ShardPasses`.

    Raises:
        ValueError: the optimizer updates what is no part of the model.
    """

    def __init__(
        self,
        model: nn.Module,
        exchange: Exchange,
        seed: int,
        optimizer: Optimizer,
        others: Sequence[Device],
    ) -> None:
        super().__init__(model, exchange, seed)
        check_within(model, exchange.parameters)
        self._optimizer = optimizer
        self.others, self._copies = others, [exchange.device.copies() for _ in others]
        self._model_copies: ModelCopies | None = None
        self._computes_in_turn = exchange.device.is_host
        self._computed: list[_Computed] = []
        self._num_steps = 0
        self._divided: Sequence[Sequence[int]] = []

    @property
    def _further(self) -> list[DeviceReplica]:
        return self._replicas[1:]

    def divide(self) -> None:
        """See :class:`ShardPasses`."""
        division = self._exchange.division
        self._assign(division.shards, division.mine)

    def take_over(self, parts: Sequence[Node]) -> Sequence[int]:
        """See :class:`ShardPasses`."""
        self._assign([shard for part in parts for shard in range(part.lo, part.hi)], parts)
        self._begin_parts()
        self.begin_passes(self._sizes)
        return self.shards

    def begin(self, step: int, first_shard: int, turn: int = 0, others: Sequence[int] = ()) -> None:
        """See :class:`ShardPasses`; the copies are as the model is."""
        super().begin(step, first_shard, turn, others)
        self._num_steps += 1
        if not self._place_of:
            self._place(self._divided)
        if self._model_copies is None:
            self._make()
        else:
            self._model_copies.follow()
        for replica in self._further:
            replica.others = [replica.parameters[index] for index in others]
            replica.buffers.begin_as(self.home.buffers)
            replica.clear_gradients()
        self._begin_parts()

    def begin_passes(self, sizes: Sequence[int]) -> None:
        """See :class:`ShardPasses`."""
        self._sizes = sizes
        rounds = [[shard for shard in each if sizes[shard]] for each in self._rounds]
        self._ends_of_rounds = {each[-1] for each in rounds if each}

    def end_passes(self) -> None:
        """See :class:`ShardPasses`."""
        self.home.device.use()

    def start(self, shard: int) -> nn.Module:
        """See :class:`ShardPasses`."""
        replica = self._replicas[self._place_of.get(shard, 0)]
        replica.device.use()
        self._start(replica, shard)
        if not self._computes_in_turn:
            self._seeded = HostGenerators.now()
        return replica.model

    def repeat(self, shard: int) -> nn.Module:
        """See :class:`ShardPasses`."""
        self._computed.clear()
        for replica in self._replicas:
            replica.clear_gradients()
        return self.start(shard)

    def add(self, shard: int, backward: Backward | None) -> None:
        """See :class:`ShardPasses`; losses of one round are differentiated together."""
        for replica in self._further:
            replica.check_gradients()
        if backward is not None and self._num_steps <= _LOOKED_THROUGH_AT_FIRST:
            self._check_graph(shard, backward[0])
        drawn = None
        if not (self._computes_in_turn or self._seeded.are_now()):
            drawn = HostGenerators.now()
        self._computed.append(_Computed(shard, backward, drawn))
        if self._computes_in_turn or shard in self._ends_of_rounds:
            self._differentiate()
        self.is_waiting = bool(self._computed)

    def skip(self, shard: int) -> None:
        """See :class:`ShardPasses`."""
        self._take(_Computed(shard, None, None))

    def finished(self) -> Iterator[Finished]:
        """See :class:`ShardPasses`."""
        for copies in self._copies:  # of parameters, which are changed next
            copies.before_changes()
        done = {node: replica for replica in self._replicas for node in replica.done}
        for part in self._parts:
            nodes = within(part, list(done))
            values = [done[node].brought(node, self.home.device) for node in nodes]
            yield part, tree_sum(values, add_gradients, as_whole(part, nodes))

    def commit(self, present: Sequence[bool]) -> None:
        """See :class:`ShardPasses`; gives the copies what the optimizer has changed."""
        super().commit(present)
        if changes_what_has_gradients(self._optimizer):
            changed = [at for at, is_there in enumerate(present) if is_there]
            self._send([[replica.parameters[at] for at in changed] for replica in self._replicas])
        else:
            self._send([[*replica.parameters, *replica.fixed] for replica in self._replicas])

    def found_in(self, error: BaseException, shard: int | None) -> tuple[Device, int | None]:
        """See :class:`ShardPasses`; torch names the device that an error is about."""
        named = re.search(rf"\b(?:GPU |{self.home.device.torch.type}:)(\d+)", str(error))
        devices = [self.home.device, *self.others]
        for at, device in enumerate(devices):
            if named is not None and device.torch.index == int(named[1]):
                others = next((each for each in self._rounds if shard in each), [])
                return device, next((v for v in others if self._place_of[v] == at), None)
        return self._device if shard is None else self.devices[shard], shard

    def computed_with(self, shard: int) -> Sequence[int]:
        """See :class:`ShardPasses`."""
        rounds = self._rounds if self._place_of and not self._computes_in_turn else []
        return next((each for each in rounds if shard in each), [shard])

    def drop(self) -> None:
        """See :class:`ShardPasses`."""
        self._replicas, self._model_copies = [self.home], None
        self._computed = []
        self.home.begin([])
        self.home.device.use()

    def _place(self, divided: Sequence[Sequence[int]]) -> None:
        """Compute shards where they are divided to, and others, maybe of a lost worker, at home."""
        self._place_of = {shard: at for at, own in enumerate(divided) for shard in own}
        devices = [self._device, *self.others]
        each = range(self._num_shards)
        self.devices = {shard: devices[self._place_of.get(shard, 0)] for shard in each}

    def _assign(self, shards: Sequence[int], parts: Sequence[Node]) -> None:
        self._parts = parts
        self._divided = divide(shards, 1 + len(self.others))
        self._rounds = rounds_of(self._divided)
        self._place(self._divided)
        self.shards = [shard for each in self._rounds for shard in each]

    def _begin_parts(self) -> None:
        self._computed, self.is_waiting = [], False
        for replica, own in zip(self._replicas, self._divided, strict=True):
            replica.begin(parts_among(own, self._num_shards))

    def _make(self) -> None:
        self._model_copies = ModelCopies(self._model, [d.torch for d in self.others])
        for device, model in zip(self.others, self._model_copies.models, strict=True):
            own = dict(zip(map(id, self._model.parameters()), model.parameters(), strict=True))
            buffers = Buffers(model, device, device.copies())
            buffers.bind_beside()
            parameters = [own[id(parameter)] for parameter in self.home.parameters]
            fixed = [own[id(p)] for p in self.home.fixed if id(p) in own]
            self._replicas.append(DeviceReplica(device, model, parameters, fixed, buffers))

    def _differentiate(self) -> None:
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
        if any(each.shard == self._first_shard for each in computed):
            replica = self._replicas[self._place_of[self._first_shard]]
            if replica is not self.home:
                replica.buffers.give_to(self.home.buffers)
            self.home.buffers.keep()

    def _take(self, computed: _Computed) -> None:
        replica = self._replicas[self._place_of[computed.shard]]
        if computed.backward is None:
            finished = replica.stack.push_nothing(computed.shard)
        else:
            if not replica.has_gradients():
                self._check_graph(computed.shard, computed.backward[0])
            finished = replica.push(computed.shard)
        if finished is not None:
            replica.done.update([finished])

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
                f"each device, but the loss of shard {shard}, on {self.devices[shard].name}, "
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
    for node in graph_of([loss]):
        if isinstance(leaf := getattr(node, "variable", None), torch.Tensor):
            yield leaf
