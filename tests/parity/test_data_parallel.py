"""`DataParallel` in a plain loop: one digest for one, two and three devices, and equal chunks."""

from __future__ import annotations

import pytest
import torch
from tests.data_parallel.networks import Cnn, Gpt, bits_of, images, texts, train

import unisono

MODELS = {
    "cnn": (Cnn, images),
    "gpt": (Gpt, texts),
    "gpt with activation checkpoints": (lambda: Gpt(checkpointed=True), texts),
}
ON_CPUS = [["cpu"], ["cpu", "cpu"], ["cpu"] * 3]
ON_SIM = [["sim:0"], ["sim:0", "sim:1"], ["sim:2", "sim:0", "sim:3"]]


def trained(model, device_ids, shards, **options):
    make, batches = MODELS[model]
    torch.manual_seed(0)
    module = make().to(device_ids[0])
    wrapped = unisono.DataParallel(module, device_ids, shards=shards)
    losses = train(wrapped, batches, **options)
    return bits_of(module), losses, torch.rand(2).tolist()


@pytest.mark.parametrize("shards", [2, 3, 4, 8])
@pytest.mark.parametrize("model", MODELS)
def test_the_number_of_devices_changes_no_bit(model, shards, accelerator):
    first, *others = [trained(model, ids, shards) for ids in ON_CPUS + ON_SIM]
    assert all(other == first for other in others)


@pytest.mark.parametrize("model", MODELS)
def test_the_number_of_chunks_is_part_of_the_result(model):
    one, other = (trained(model, ["cpu", "cpu"], shards) for shards in (2, 4))
    assert one != other


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("device_ids", [["cpu"], ["cpu", "cpu"]])
def test_one_chunk_is_the_module_itself(model, device_ids):
    make, batches = MODELS[model]
    torch.manual_seed(0)
    module = make()
    losses = train(module, batches)
    plain = bits_of(module), losses, torch.rand(2).tolist()
    assert trained(model, device_ids, 1) == plain


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("model", ["cnn", "gpt"])
def test_gradients_are_those_of_a_plain_loop_to_rounding(model, fused):
    make, batches = MODELS[model]
    torch.manual_seed(0)
    module = make().eval()  # no dropout, no statistics of a batch
    options = {"foreach": None, "fused": fused, "make": torch.optim.Adam}
    losses = train(module, batches, **options)
    torch.manual_seed(0)
    wrapped = unisono.DataParallel(make(), ["cpu"] * 3, shards=4).eval()
    assert train(wrapped, batches, **options) == pytest.approx(losses, rel=1e-5)
    for mine, plain in zip(wrapped.parameters(), module.parameters(), strict=True):
        assert (mine.grad is None) == (plain.grad is None)
        if plain.grad is not None:
            torch.testing.assert_close(mine.grad, plain.grad, rtol=1e-4, atol=1e-6)
