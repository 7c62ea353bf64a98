"""One shard on its way through the stages, as one stage's worker sees it: what came, what went.

Forward, values and the state of generators come from earlier stages and go to later ones; backward,
gradients take the same ways back::

    earlier stages ──► value ──► this stage's operations ──► value ──► later stages
                   ◄── gradient ◄── one backward pass ◄── gradient ◄──
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.autograd.graph import _engine_run_backward

from unisono.device import Device
from unisono.stages.pipe import MessageKind, StageMessage, StagePipe


class Flight:
    """One shard's values and gradients between stages. Final.

    Args:
        pipe: between the stages of the replica.
        number: of the shard, counted over all that were in flight since the pipe was restarted.
        shard: the same in the step.
        device: where this stage computes.
    """

    def __init__(self, pipe: StagePipe, number: int, shard: int, device: Device) -> None:
        self._pipe, self._number, self._device = pipe, number, device
        self._shard = shard
        self._earlier: set[int] = set()
        self._later: set[int] = set()
        self._sent: list[tuple[int, torch.Tensor]] = []
        self._received: list[tuple[int, _Arrival]] = []
        self._corrected: tuple[torch.Tensor, torch.Tensor] | None = None

    def send(self, stage: int, tensor: torch.Tensor) -> None:
        """Send a value to a later stage."""
        self._later.add(stage)
        self._pipe.send(stage, self._number, MessageKind.VALUE, tensor)
        if tensor.requires_grad:
            self._sent.append((stage, tensor))

    def receive(self, stage: int) -> torch.Tensor:
        """Wait for a value of an earlier stage."""
        self._earlier.add(stage)
        tensor = self._receive(stage, MessageKind.VALUE).tensor
        assert tensor is not None
        if not tensor.requires_grad:
            return tensor
        arrival = _Arrival()
        self._received.append((stage, arrival))
        return arrival.begin(tensor.requires_grad_(False))

    def lend(self, stage: int, parameter: torch.Tensor) -> None:
        """Have a later stage compute with a parameter of this one."""
        if parameter.requires_grad:
            self._later.add(stage)
            self._sent.append((stage, parameter))

    def borrow(self, stage: int, parameter: torch.Tensor) -> torch.Tensor:
        """Compute with a parameter of an earlier stage."""
        if not parameter.requires_grad:
            return parameter
        self._earlier.add(stage)
        arrival = _Arrival()
        self._received.append((stage, arrival))
        return arrival.stand_for(parameter)

    def hand_on(self, stage: int) -> None:
        """Tell a later stage where the generators stand."""
        self._later.add(stage)
        self._pipe.send(stage, self._number, MessageKind.GENERATORS, self.generators())

    def take_on(self, stage: int) -> None:
        """Have the generators where an earlier stage has left them."""
        self._earlier.add(stage)
        before = self.generators()
        state = self._receive(stage, MessageKind.GENERATORS).tensor
        assert state is not None
        self._device.set_generators(state)
        self._corrected = (before, state)

    def generators(self) -> torch.Tensor:
        """Tell where the generators stand, as bytes."""
        return self._device.generators()

    def correct_generators(self) -> None:
        """Have generators where an earlier stage left them, if they are where they were before.

        What computes a function again puts them where they were when it was called: here that was
        before they were taken on, if another stage computed until then.
        """
        if self._corrected is not None and torch.equal(self._corrected[0], self.generators()):
            self._device.set_generators(self._corrected[1])

    def differentiate(
        self, roots: list[torch.Tensor], gradients: list[Any], watched: AbstractContextManager[None]
    ) -> bool:
        """Make this stage's backward pass, between those of later and of earlier stages.

        Args:
            roots: what else is to be differentiated: the loss, on the last stage.
            gradients: theirs.
            watched: torch makes the pass within it.

        Returns:
            Whether it was made; not if the loss is not finite.
        """
        for stage in sorted(self._later, reverse=True):
            begun = self._receive(stage, MessageKind.BACKWARD)
            if begun.kind == MessageKind.NO_BACKWARD:
                self.skip()
                return False
            for to, tensor in self._sent:
                if to == stage:
                    gradient = self._receive(stage, MessageKind.GRADIENT).tensor
                    if gradient is not None:
                        roots.append(tensor)
                        gradients.append(gradient)
        if roots:
            with watched:
                _run_backward(roots, gradients)
        for stage in sorted(self._earlier):
            self._pipe.send(stage, self._number, MessageKind.BACKWARD)
            for source, arrival in self._received:
                if source == stage:
                    found = arrival.gradient
                    kind = MessageKind.NO_GRADIENT if found is None else MessageKind.GRADIENT
                    self._pipe.send(stage, self._number, kind, found)
        return True

    def _receive(self, stage: int, kind: MessageKind) -> StageMessage:
        return self._pipe.receive(stage, self._number, kind, self._shard)

    def skip(self) -> None:
        """Have the earlier stages make no backward pass either."""
        for stage in sorted(self._earlier):
            self._pipe.send(stage, self._number, MessageKind.NO_BACKWARD)


def _run_backward(roots: list[torch.Tensor], gradients: list[torch.Tensor]) -> None:
    """Do what `torch.autograd.backward` does, without leaving the mode that sees operations.

    That function is one of those that a mode takes over, so what is called in it is not seen.
    """
    _engine_run_backward(
        tuple(roots),
        tuple(gradients),
        False,  # retain_graph
        False,  # create_graph
        (),  # inputs
        allow_unreachable=True,
        accumulate_grad=True,
    )


class _Arrival:
    """A value that has come from another stage, and later its gradient. Final."""

    def __init__(self) -> None:
        self._leaf: torch.Tensor | None = None
        self._gradient: torch.Tensor | None = None

    @property
    def gradient(self) -> torch.Tensor | None:
        """What the backward pass has left; None if nothing."""
        return self._gradient if self._leaf is None else self._leaf.grad

    def begin(self, tensor: torch.Tensor) -> torch.Tensor:
        """Have a value's gradient found here; it may be changed in place, as no leaf may be."""
        with torch.enable_grad():
            anchor = torch.empty(0, device=tensor.device, requires_grad=True)
            entry: Any = _Entry
            arrived: torch.Tensor = entry.apply(anchor, [tensor], self)
        return arrived

    def stand_for(self, parameter: torch.Tensor) -> torch.Tensor:
        """Give a leaf with a parameter's values."""
        self._leaf = parameter.detach().requires_grad_()
        return self._leaf

    def take(self, gradient: torch.Tensor) -> None:
        """Keep the gradient."""
        self._gradient = gradient


class _Entry(torch.autograd.Function):
    """Where a stage's graph begins."""

    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, box: list[torch.Tensor], arrival: _Arrival) -> Any:
        ctx.arrival = arrival
        return box[0]

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        ctx.arrival.take(gradient)
        return None, None, None
