"""Evaluation on a device gives a plain loop's means and waits for the device now and then."""

import pytest
import torch
from tests.loaders import loader_of
from tests.once import computed_once
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves
from torch.utils.data import TensorDataset

import unisono
from unisono.training import evaluate

DATA = TensorDataset(torch.randn(100, 6), torch.randint(3, (100,)))


def loss(model, batch):
    output = model(batch[0])
    hits = (output.argmax(1) == batch[1]).sum()
    return {
        "loss": F.cross_entropy(output, batch[1]),
        "accuracy": (hits, torch.tensor(float(len(batch[1])))),
        "on the host": 2.5,
    }


def trainer(device, loss=loss):
    torch.manual_seed(1)
    model = torch.nn.Linear(6, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return unisono.Trainer(model, optimizer, loss, shards=4, device=device)


@pytest.mark.slow
@pytest.mark.parametrize("loader_workers", [0, 2])
def test_the_host_waits_once_in_many_passes(accelerator, loader_workers):
    on_device = trainer("sim")
    expected = trainer("cpu").evaluate(DATA, batch_size=8)
    with computed_once(), accelerator.synchronizations() as seen:
        found = on_device.evaluate(loader_of(DATA, 8, num_workers=loader_workers))
    assert found == expected
    assert seen == []  # the copies of losses are asked for, not waited for by torch


def test_so_many_passes_are_pending_at_most(accelerator, monkeypatch):
    reads = []
    read = evaluate.PendingLosses.read

    def counted(pending):
        reads.append(len(pending.losses))
        return read(pending)

    monkeypatch.setattr(evaluate.PendingLosses, "read", counted)
    trainer("sim").evaluate(DATA, batch_size=2)
    assert reads == [16, 16, 16, 2]


def test_a_negative_weight_is_refused_there_too(accelerator):
    def wrong(model, batch):
        return model(batch[0]).mean(), torch.tensor(-1.0, device=batch[0].device)

    with pytest.raises(ValueError, match="the weight of loss must be at least 0, but is -1"):
        trainer("sim", wrong).evaluate(DATA, batch_size=8)


@pytest.mark.parametrize("loader_workers", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_predictions_are_those_of_the_cpu(accelerator, loader_workers):
    loader = loader_of(DATA, 8, num_workers=loader_workers)
    found = trainer("sim").predict(loader)
    assert found.device.type == "cpu"
    assert torch.equal(found, trainer("cpu").predict(loader))


OUTPUTS = {
    "several": lambda model, batch: {"a": model(batch[0]), "b": batch[1]},
    "transposed": lambda model, batch: model(batch[0]).unsqueeze(1).repeat(1, 2, 1).transpose(1, 2),
    "with gradients": lambda model, batch: model(batch[0]).requires_grad_(),
    "on the host": lambda model, batch: model(batch[0]).cpu(),
    "on both": lambda model, batch: (model(batch[0]), batch[1].cpu()),
    "as numbers of half the size": lambda model, batch: model(batch[0]).bfloat16(),
}


@pytest.mark.parametrize("forward", OUTPUTS.values(), ids=list(OUTPUTS))
def test_outputs_of_all_kinds_are_written(accelerator, forward):
    options = {"batch_size": 8, "forward": forward}
    found, expected = (trainer(device).predict(DATA, **options) for device in ("sim", "cpu"))
    pairs = list(zip(*map(tree_leaves, (found, expected)), strict=True))
    assert pairs
    assert all(torch.equal(one, other) for one, other in pairs)


@pytest.mark.slow
def test_losses_arrive_where_memory_cannot_be_pinned(accelerator, monkeypatch, capfd):
    def refuse(tensor):
        raise RuntimeError("CUDA error: out of memory")

    expected = trainer("cpu").evaluate(DATA, batch_size=8)
    monkeypatch.setattr(torch.Tensor, "pin_memory", refuse)
    on_device = trainer("sim")
    assert on_device.evaluate(DATA, batch_size=8) == expected
    digests = [one.fit(DATA, batch_size=8, epochs=1).digest for one in (on_device, trainer("cpu"))]
    assert digests[0] == digests[1]
    assert capfd.readouterr().err.count("not pinned") == 1
