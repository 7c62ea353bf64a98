"""With one shard, the bits of a plain torch loop; with two, DDP's results to float rounding."""

import tempfile

import pytest
import torch
import torch.distributed as dist
from tests.parity import cases
from tests.parity.plain import check_bits, made, mean_of, plain_loop, trained
from tests.promises import promise
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DistributedSampler

import unisono

ALL_OPTIMIZERS = cases.OPTIMIZERS | cases.OTHER_OPTIMIZERS


def unisono_loop(*case):
    return {name: value.clone() for name, value in trained(*case).run.model.state_dict().items()}


@promise("one-result.2")
@pytest.mark.parametrize("optimizer", ALL_OPTIMIZERS)
def test_one_shard_has_the_bits_of_a_plain_loop_with_every_optimizer(optimizer):
    steps = 10  # an epoch has 7; RAdam does something else from its sixth on
    check_bits(trained("cnn", optimizer, 1, steps), plain_loop("cnn", optimizer, steps))


@pytest.mark.parametrize(
    ("model", "optimizer"),
    [("sometimes unused", "adam"), ("mixed", "fused adamw"), ("matrices", "muon")],
)
def test_one_shard_has_the_bits_of_a_plain_loop_with_unusual_models(model, optimizer):
    check_bits(trained(model, optimizer, 1, 25), plain_loop(model, optimizer, 25))


def ddp_loop(store, steps):
    """torch's DDP over the same batches: each rank its shard of every global batch."""
    rank, world_size = unisono.world().rank, unisono.world().world_size
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world_size)
    model, data, loss, optimizer = made("cnn", "adam")
    model = DistributedDataParallel(model)
    sampler = DistributedSampler(data, seed=5)
    share = cases.BATCH_SIZE // world_size
    order = list(sampler)
    for start in range(0, steps * share, share):
        optimizer.zero_grad()
        mean_of(loss, model, data[order[start : start + share]]).backward()
        optimizer.step()
    weights = {name: tensor.clone() for name, tensor in model.module.state_dict().items()}
    del model, optimizer
    dist.destroy_process_group()
    return weights


@pytest.mark.slow
def test_two_shards_agree_with_ddp_on_two_ranks_to_rounding(monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    steps = 6  # within the first epoch, whose batches are all full
    with tempfile.TemporaryDirectory() as folder:
        theirs = unisono.launch(ddp_loop, f"{folder}/store", steps, workers=2)
    ours = unisono.launch(unisono_loop, "cnn", "adam", 2, steps, workers=2)
    assert theirs[0].keys() == ours[0].keys()
    for name in ours[0]:
        torch.testing.assert_close(ours[0][name], theirs[0][name], rtol=1e-4, atol=1e-6)


def masked(model, batch):
    """Sum the loss of some of a batch's samples, and count them."""
    outputs = model(batch[0])
    mask = (torch.arange(len(outputs)) % 3 != 1).to(outputs.dtype)
    losses = torch.nn.functional.cross_entropy(outputs, batch[1], reduction="none")
    return (losses * mask).sum(), mask.sum()


def masked_loop(order, steps=9):
    """Train as a plain loop would, with the division before or after the backward pass."""
    weights = []

    def total(model, batch):
        loss, weight = masked(model, batch)
        weights.append(weight)
        return loss

    def differentiate_and_divide(loss, model, optimizer):
        loss.backward()
        for parameter in model.parameters():
            parameter.grad.div_(weights[-1])
        optimizer.step()

    if order == "divide, then differentiate":
        return plain_loop("cnn", "sgd with momentum", steps, loss=masked).state_dict()
    options = {"loss": total, "update": differentiate_and_divide}
    return plain_loop("cnn", "sgd with momentum", steps, **options).state_dict()


@promise("one-result.3")
def test_a_sum_is_differentiated_before_it_is_divided():
    """The weight of all shards is known only then, so this is the one formula for any shards."""
    model, data, _, optimizer = made("cnn", "sgd with momentum")
    trainer = unisono.Trainer(model, optimizer, masked, shards=1, seed=5)
    trainer.fit(data, batch_size=cases.BATCH_SIZE, steps=9)
    ours = model.state_dict()
    same = masked_loop("differentiate, then divide")
    other = masked_loop("divide, then differentiate")
    assert all(torch.equal(ours[name], same[name]) for name in ours)
    assert any(not torch.equal(ours[name], other[name]) for name in ours)
    for name in ours:
        torch.testing.assert_close(ours[name], other[name], rtol=1e-4, atol=1e-5)
