"""Every optimizer of torch, in each of the ways in which torch computes it on the device."""

from __future__ import annotations

import pytest
import torch
from tests.gpu import cases
from tests.gpu.devices import deterministic
from tests.gpu.loops import first_difference, plain_loop, unisono_loop

STEPS = 7  # RAdam does something else from its sixth on
SHAPES = ((257, 129), (1003,))
PIECE = 64 * 5 + 16  # elements; not every kernel's vector ends there


@pytest.mark.parametrize(("name", "way"), cases.ROWS)
def test_one_shard_has_the_bits_of_a_plain_loop(name, way, device):
    if reason := cases.is_offered(name, way, device):
        pytest.skip(reason)
    how = {"optimizer": name, "way": way}
    theirs = plain_loop("cnn", device, STEPS, **how)
    assert first_difference(unisono_loop("cnn", device, STEPS, **how), theirs) is None


@pytest.mark.parametrize(("name", "way"), cases.ROWS)
def test_pieces_against_whole_parameters(name, way, device, record):
    """Whether updates of pieces have the bits of whole ones is a fact for later, and not asserted.

    What is asserted: whole updates of the same gradients have the same bits twice.
    """
    if reason := cases.is_offered(name, way, device):
        pytest.skip(reason)
    whole = updated(name, way, device, cut=False)
    assert torch.equal(whole, updated(name, way, device, cut=False))
    is_cut = not cases.OPTIMIZERS[name].only_matrices  # a piece is none
    is_equal = is_cut and torch.equal(whole, updated(name, way, device, cut=True))
    record(optimizer=name, way=way, pieces_have_the_bits_of_the_whole=is_equal)


def updated(name, way, device, *, cut):
    """Take some steps with given gradients, on whole parameters or on pieces; returns all of it."""

    def parts(tensor):
        return tensor.view(-1).split(PIECE) if cut else [tensor]

    begin = [values(shape, 1, device) for shape in SHAPES]
    parameters = [torch.nn.Parameter(part.clone()) for one in begin for part in parts(one)]
    optimizer = cases.OPTIMIZERS[name].of(parameters, way)
    with deterministic():
        for step in range(STEPS):
            gradients = [values(shape, 2 + step, device) for shape in SHAPES]
            every = [part for one in gradients for part in parts(one)]
            for parameter, gradient in zip(parameters, every, strict=True):
                parameter.grad = gradient.clone()
            optimizer.step()
    return torch.cat([parameter.detach().view(-1) for parameter in parameters])


def values(shape, seed, device):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(device)
