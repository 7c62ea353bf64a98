"""The step loop in one process: what it gives, what it refuses, what it leaves behind."""

import random

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from tests.classified import at_random, taken
from tests.classified import cross_entropy as loss_of
from tests.promises import promise
from torch import nn
from torch.utils.data import IterableDataset, TensorDataset

import unisono


def make(shards=2, **options):
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return unisono.Run(model, optimizer, shards=shards, **options)


def data(num_samples=10):
    return at_random(num_samples, 4, 2, seed=0)


def train(run, dataset, **options):
    yield from taken(run, loss_of, dataset, **options)


def test_steps_are_numbered_over_the_whole_run_and_epochs_are_totals():
    run = make()
    seen = [
        (s.number, s.epoch, s.batch, s.num_samples)
        for s in train(run, data(), batch_size=4, epochs=1)
    ]
    assert seen == [(0, 0, 0, 4), (1, 0, 1, 4), (2, 0, 2, 2)]
    seen = [s.number for s in train(run, data(), batch_size=4, epochs=2)]
    assert seen == [3, 4, 5]
    assert list(train(run, data(), batch_size=4, epochs=2)) == []
    assert [s.number for s in train(run, data(), batch_size=4, steps=8, epochs=9)] == [6, 7]


def test_pairs_are_averaged_over_their_true_weight():
    run, dataset = make(shards=2), data(8)
    weights = torch.arange(8.0)
    dataset = TensorDataset(*dataset.tensors, weights)
    before = nn.Linear(4, 2)
    before.load_state_dict(run.model.state_dict())
    for step in run.steps(dataset, batch_size=8, steps=1, shuffle=False):
        with step:
            for inputs, labels, weight in step.shards:
                losses = F.cross_entropy(run.model(inputs), labels, reduction="none")
                hits = (run.model(inputs).argmax(1) == labels).float().mean()
                step.backward({"loss": ((losses * weight).sum(), weight.sum()), "hits": hits})
        losses = F.cross_entropy(before(dataset.tensors[0]), dataset.tensors[1], reduction="none")
        expected = (losses * weights).sum() / weights.sum()
        assert step.loss == pytest.approx(expected.item(), abs=1e-6)
        expected.backward()
        torch.testing.assert_close(run.model.weight, before.weight - 0.1 * before.weight.grad)
        assert 0 <= step.means["hits"] <= 1


@promise("one-result.9")
def test_generators_are_seeded_per_shard_and_put_back_afterwards():
    def draws(run):
        drawn = []
        for step in run.steps(data(), batch_size=4, steps=2):
            with step:
                for batch in step.shards:
                    drawn.append((torch.rand(()).item(), random.random(), np.random.rand()))
                    step.backward(loss_of(run.model, batch))
        return drawn

    one, other = make(), make()
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    first = draws(one)
    assert torch.equal(torch.get_rng_state(), states[0])
    assert random.getstate() == states[1]
    assert np.random.get_state()[1].tolist() == states[2]
    assert draws(other) == first
    assert len(set(first)) == 4


def test_threads_are_those_of_the_run_inside_and_the_callers_outside():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        run = make()
        for _ in train(run, data(), batch_size=4, steps=1):
            assert torch.get_num_threads() == 1
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def test_the_model_has_memory_of_its_own_after_and_that_which_is_kept_again():
    run = make()
    kept = run.model.weight.detach()
    loop = train(run, data(), batch_size=4, steps=2)
    next(loop)
    inside = run.model.weight.data_ptr()
    for _ in loop:
        pass
    assert run.model.weight.data_ptr() == kept.data_ptr() != inside
    assert torch.equal(run.model.weight, kept)
    assert run.model.weight.grad is None
    del kept
    loop = train(run, data(), batch_size=4, steps=4)
    next(loop)
    inside = run.model.weight.data_ptr()
    loop.close()
    assert run.model.weight.data_ptr() != inside


def test_optimizer_state_can_be_saved_and_loaded_between_loops():
    def trained(interrupt):
        torch.manual_seed(0)
        model = nn.Linear(4, 2)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        run = unisono.Run(model, optimizer, shards=2)
        for _ in train(run, data(), batch_size=4, steps=4):
            pass
        if interrupt:
            optimizer.load_state_dict(optimizer.state_dict())
        for _ in train(run, data(), batch_size=4, steps=8):
            pass
        return model.weight

    assert torch.equal(trained(True), trained(False))


def test_parameters_changed_between_loops_are_trained_on():
    run = make()
    for _ in train(run, data(), batch_size=4, steps=1):
        pass
    with torch.no_grad():
        run.model.weight.zero_()
        run.model.bias.zero_()
    step = next(train(run, data(), batch_size=4, steps=2))
    assert step.loss == pytest.approx(0.6931, abs=1e-3)


class Endless(IterableDataset):
    def __iter__(self):
        return iter(())


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"batch_size": 1}, ValueError, r"`batch_size` .* at least `shards` \(2\), but is 1"),
        ({"batch_size": 0}, ValueError, "`batch_size` must be at least 1, but is 0"),
        ({"batch_size": 2.5}, TypeError, "`batch_size` must be a whole number, but is 2.5"),
        ({"batch_size": 4, "epochs": None}, ValueError, "`epochs` or `steps` must say"),
        ({"batch_size": 4, "epochs": -1}, ValueError, "`epochs` must be at least 0, but is -1"),
        ({"batch_size": 4, "dataset": TensorDataset(torch.zeros(0, 4))}, ValueError, "is empty"),
        (
            {"batch_size": 4, "dataset": Endless()},
            TypeError,
            "Endless is an IterableDataset w",
        ),
        ({"batch_size": 4, "dataset": 7}, TypeError, "`__getitem__` and `__len__`, but int"),
    ],
)
def test_wrong_input_is_refused_before_any_training(options, error, message):
    run = make()
    options = {"dataset": data(), "epochs": 1} | options
    with pytest.raises(error, match=message):
        run.steps(options.pop("dataset"), **options)
    assert run.position.step == 0


@pytest.mark.parametrize(
    ("value", "error", "message"),
    [
        (lambda p: p.sum(1), ValueError, r"loss must be a scalar, but has shape \(2,\)"),
        (lambda p: p.sum().item(), TypeError, "must return a scalar tensor.* returned float"),
        (lambda p: p.sum().detach(), ValueError, "must depend on the model's parameters"),
        (lambda p: {"accuracy": p.sum()}, TypeError, 'must have "loss" in it'),
        (lambda p: (p.sum(), -1.0), ValueError, "weight of loss must be at least 0"),
        (lambda p: (p.sum(), 0.0), ValueError, "must add up to more than 0"),
        (lambda p: {"loss": p.sum(), "x": "y"}, TypeError, "x must be a real number"),
    ],
)
def test_losses_of_other_forms_are_refused(value, error, message):
    run = make()
    with pytest.raises(error, match=message):
        for step in run.steps(data(), batch_size=4, steps=3):
            with step:
                for _ in step.shards:
                    step.backward(value(run.model.weight))
    assert run.position.step == 0


def test_a_loop_written_wrongly_is_told_so():
    run = make()
    with pytest.raises(RuntimeError, match="every step must be used as `with step:`"):
        for _ in run.steps(data(), batch_size=4, steps=3):
            pass
    with pytest.raises(RuntimeError, match=r"shards \[0, 1\] of step 0 have no loss"):
        for step in run.steps(data(), batch_size=4, steps=3):
            with step:
                pass
    with pytest.raises(RuntimeError, match="must be called before the next batch is taken"):
        for step in run.steps(data(), batch_size=4, steps=3):
            with step:
                list(step.shards)
    with pytest.raises(RuntimeError, match="must be entered"):
        for step in run.steps(data(), batch_size=4, steps=3):
            next(iter(step.shards))
    with pytest.raises(RuntimeError, match="there is no batch without its loss"):
        for step in run.steps(data(), batch_size=4, steps=3):
            with step:
                step.backward(run.model.weight.sum())
    with pytest.raises(RuntimeError, match="with the sum if a batch has several losses"):
        for step in run.steps(data(), batch_size=4, steps=3):
            with step:
                for batch in step.shards:
                    step.backward(loss_of(run.model, batch))
                    step.backward(loss_of(run.model, batch))


def test_another_batch_size_must_wait_for_the_epochs_end():
    run = make()
    for _ in train(run, data(), batch_size=4, steps=1):
        pass
    with pytest.raises(ValueError, match="finish the epoch first"):
        run.steps(data(), batch_size=5, epochs=2)


@promise("one-result.11")
@pytest.mark.parametrize(
    ("model", "optimizer", "message"),
    [
        (nn.Embedding(4, 2, sparse=True), torch.optim.SGD, "`sparse=True`: make it with"),
        (nn.Embedding(4, 2, max_norm=1.0), torch.optim.SGD, r"\(Embedding\) has `max_norm=1.0`"),
        (nn.EmbeddingBag(4, 2, max_norm=1.0), torch.optim.SGD, r"\(EmbeddingBag\) has `max_norm"),
        (nn.LazyLinear(2), torch.optim.SGD, "is lazy: run the model once"),
        (
            nn.Sequential(nn.Linear(2, 2), nn.LazyBatchNorm1d(affine=False)),
            torch.optim.SGD,
            "buffers must have their shape .* `1.running_mean` is lazy: run the model once",
        ),
        (nn.Linear(2, 2, device="meta"), torch.optim.SGD, "must be on the CPU"),
        (nn.Linear(2, 2), torch.optim.SparseAdam, "SparseAdam takes sparse ones alone"),
        (
            nn.Linear(2, 2),
            lambda p: torch.optim.Adam(p, differentiable=True),
            "`differentiable` must be off",
        ),
        (
            nn.Linear(2, 2).bfloat16(),
            lambda p: torch.optim.SGD(p, momentum=0.9, fused=True),
            "`fused` must be off for SGD with momentum on torch.bfloat16",
        ),
        (
            nn.Linear(2, 2),
            lambda p: list(p),
            "must be a torch.optim.Optimizer, but is of type list",
        ),
        (torch.sum, lambda p: torch.optim.SGD([torch.zeros(1)]), "must be a torch.nn.Module"),
    ],
)
def test_what_cannot_be_trained_is_refused_at_construction(model, optimizer, message):
    parameters = list(model.parameters()) if isinstance(model, nn.Module) else []
    made = optimizer(parameters)
    with pytest.raises((ValueError, TypeError), match=message):
        unisono.Run(model, made, shards=1)
