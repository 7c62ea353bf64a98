"""Buffers that a forward pass replaces: kept with a done step, undone where the run goes back."""

from types import SimpleNamespace

import torch

from unisono.engine.exchange.arena import size_of
from unisono.engine.exchange.buffers import Buffers
from unisono.runtime.device import host


class Counts(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("seen", torch.zeros(3))

    def forward(self, inputs):
        self.seen = self.seen + 1  # a new tensor each time
        return inputs


def bound(model):
    buffers = Buffers(model, host(), host().copies())
    copies = [torch.zeros(size_of(buffers.slots), dtype=torch.uint8) for _ in range(2)]
    arena = SimpleNamespace(buffers=[SimpleNamespace(everything=lambda c=c: c) for c in copies])
    buffers.bind(arena)
    buffers.give()
    return buffers


def step(model, buffers, *, keeps=True):
    buffers.begin(0)
    buffers.restore()
    model(torch.zeros(1))
    if keeps:
        buffers.keep()


def test_a_replaced_buffer_is_kept_with_its_step():
    model = Counts()
    buffers = bound(model)
    for _ in range(2):
        step(model, buffers)
        buffers.commit()
    assert model.seen.tolist() == [2.0] * 3


def test_a_replaced_buffer_is_undone_with_its_step():
    model = Counts()
    buffers = bound(model)
    step(model, buffers)
    buffers.commit()
    step(model, buffers, keeps=False)  # the first shard is another worker's
    buffers.load(buffers.now)  # somebody was lost in the midst of the update
    step(model, buffers)
    buffers.commit()
    assert model.seen.tolist() == [2.0] * 3
