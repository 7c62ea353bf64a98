"""Evaluation is what a plain loop finds, bit for bit, on any number of workers."""

import math

import pytest
import torch
import torch.nn.functional as F
from tests.classified import at_random
from tests.classified import cross_entropy as loss_of
from tests.loaders import loader_of
from tests.once import computed_once
from torch import nn
from torch.utils._pytree import tree_leaves
from torch.utils.data import TensorDataset

import unisono
from unisono.runtime.device import num_threads
from unisono.training import evaluate

NUM_SAMPLES = 2_003  # a prime: the last batch is short, whatever the size


def data(num_samples):
    return at_random(num_samples, 6, 3, seed=1)


def make(loss, shards=4):
    torch.manual_seed(2)
    model = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.5), nn.Tanh(), nn.Linear(8, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return unisono.Trainer(model, optimizer, loss, shards=shards)


def hits_and_loss(model, batch):
    outputs = model(batch[0])
    hits = (outputs.argmax(1) == batch[1]).sum()
    return {"loss": F.cross_entropy(outputs, batch[1]), "accuracy": (hits, len(batch[1]))}


def plain_losses(loss, batches):
    """The losses of a plain loop, and how many samples each is the mean of."""
    model = make(loss).run.model.eval()
    inputs, targets = data(NUM_SAMPLES).tensors
    with torch.no_grad(), num_threads(1):
        return [
            (loss(model, (inputs[indices], targets[indices])).item(), len(indices))
            for indices in batches
        ]


def evaluate_one_by_one():
    return make(loss_of).evaluate(data(NUM_SAMPLES), batch_size=1)["loss"]


@pytest.mark.slow
def test_the_mean_is_a_plain_loops_per_sample_mean_on_one_to_four_workers():
    losses = [loss for loss, _ in plain_losses(loss_of, torch.arange(NUM_SAMPLES).split(1))]
    expected = math.fsum(losses) / NUM_SAMPLES
    # float32 losses of one size leave a float64 sum nothing to round: any plain loop will do.
    assert sum(losses) / NUM_SAMPLES == expected
    assert evaluate_one_by_one() == expected
    for workers in (2, 3, 4):
        assert unisono.launch(evaluate_one_by_one, workers=workers) == [expected] * workers


def test_a_sweep_computes_with_the_threads_of_a_run():
    used = []

    def note(model, batch):
        used.append(torch.get_num_threads())
        return loss_of(model, batch)

    with computed_once(), num_threads(2):
        make(note).evaluate(data(8), batch_size=8)
        assert (set(used), torch.get_num_threads()) == ({1}, 2)


@pytest.mark.parametrize("batch_size", [2, 64, 1000])
def test_the_mean_over_batches_is_that_of_a_plain_loop_whatever_the_shards(batch_size):
    batches = torch.arange(NUM_SAMPLES).split(batch_size)
    terms = [loss * num_samples for loss, num_samples in plain_losses(loss_of, batches[::-1])]
    for shards in (1, 4, 7):
        found = make(loss_of, shards).evaluate(data(NUM_SAMPLES), batch_size=batch_size)
        assert found == {"loss": math.fsum(terms) / NUM_SAMPLES}


def test_counts_are_exact_whatever_the_batches():
    inputs, targets = data(NUM_SAMPLES).tensors
    model = make(hits_and_loss).run.model.eval()
    expected = int((model(inputs).argmax(1) == targets).sum()) / NUM_SAMPLES
    for shards, batch_size in [(1, NUM_SAMPLES), (3, 64), (4, 999)]:
        found = make(hits_and_loss, shards).evaluate(data(NUM_SAMPLES), batch_size=batch_size)
        assert found["accuracy"] == expected


def test_a_shard_without_samples_has_no_part_in_a_mean():
    means = make(hits_and_loss).evaluate(data(2), batch_size=4)
    assert means == make(hits_and_loss, shards=2).evaluate(data(2), batch_size=4)


def test_what_addition_in_any_order_would_lose_is_kept():
    dataset = TensorDataset(torch.tensor([1e16, 1.0, -1e16, 1.0], dtype=torch.float64))
    for shards in (1, 2, 4):
        trainer = make(lambda model, batch: batch[0].sum(), shards)
        assert trainer.evaluate(dataset, batch_size=1) == {"loss": 0.5}


def test_the_names_must_be_the_same_for_every_shard():
    trainer = make(lambda model, batch: {"loss": batch[0].sum(), f"{len(batch[1])}": 1.0}, shards=2)
    with pytest.raises(unisono.errors.MismatchError, match="the same names for every shard"):
        trainer.evaluate(data(3), batch_size=2)


class Rescaling(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Parameter(torch.full((4, 3), 2.0))

    def forward(self, indices):
        return F.embedding(indices, self.table, max_norm=1.0)


@pytest.mark.parametrize("use", ["evaluate", "predict"])
@pytest.mark.parametrize("which", ["the trained one", "another"])
def test_a_pass_that_changes_parameters_is_refused(use, which):
    torch.manual_seed(0)
    trained = Rescaling() if which == "the trained one" else nn.Linear(2, 2)
    other = None if which == "the trained one" else Rescaling()
    optimizer = torch.optim.SGD(trained.parameters(), lr=0.1)
    loss = lambda model, batch: model(batch).mean()  # noqa: E731
    trainer = unisono.Trainer(trained, optimizer, loss, shards=2)
    with pytest.raises(RuntimeError, match=r"without training must leave .* but `table` was"):
        getattr(trainer, use)(torch.arange(4), batch_size=4, model=other)


def test_parameters_made_in_inference_mode_and_lazy_ones_are_let_through():
    with torch.inference_mode():
        model = nn.Linear(6, 3)
    trainer = make(loss_of)
    trainer.evaluate(data(8), batch_size=4, model=nn.Sequential(model))
    trainer.evaluate(data(8), batch_size=4, model=nn.Sequential(nn.LazyLinear(3)))


# On a device the host waits now and then.

DATA = TensorDataset(torch.randn(100, 6), torch.randint(3, (100,)))


def of_a_device(model, batch):
    output = model(batch[0])
    hits = (output.argmax(1) == batch[1]).sum()
    return {
        "loss": F.cross_entropy(output, batch[1]),
        "accuracy": (hits, torch.tensor(float(len(batch[1])))),
        "on the host": 2.5,
    }


def trainer(device, loss=of_a_device):
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
