"""Evaluation is what a plain loop finds, bit for bit, on any number of workers."""

import math

import pytest
import torch
import torch.nn.functional as F
from tests.classified import at_random
from tests.classified import cross_entropy as loss_of
from tests.once import computed_once
from torch import nn
from torch.utils.data import TensorDataset

import unisono
from unisono.runtime.device import num_threads

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
