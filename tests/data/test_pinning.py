"""Pinning reaches every tensor of a batch, and does nothing where there is no GPU."""

import warnings
from collections import OrderedDict, namedtuple

import pytest
import torch
from tests.data import augmenting
from tests.loaders import loader_of

from unisono.data import loader
from unisono.runtime.device import pin

Pair = namedtuple("Pair", "image label")


class Own:
    def __init__(self, is_pinned=False):
        self.is_pinned = is_pinned

    def pin_memory(self):
        return Own(is_pinned=True)


class Odd(list):
    """Cannot be made of a list."""

    def __init__(self):
        super().__init__()


@pytest.fixture
def marked(monkeypatch):
    """Pinning without a GPU: gives the tensor's negative."""
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: -tensor)
    return -torch.ones(2)


def test_every_tensor_is_pinned_and_all_else_stays(marked):
    ones = torch.ones(2)
    batch = {"pair": Pair(ones, ["a", ones]), "tuple": (ones, 3), "none": None, "own": Own()}
    found = pin(OrderedDict(batch))
    assert type(found) is OrderedDict
    assert torch.equal(found["pair"].image, marked)
    assert found["pair"].label[0] == "a"
    assert torch.equal(found["pair"].label[1], marked)
    assert torch.equal(found["tuple"][0], marked)
    assert found["tuple"][1] == 3
    assert found["none"] is None
    assert found["own"].is_pinned
    assert pin(Odd()) == []


@pytest.mark.slow
@pytest.mark.parametrize("loader_workers", [0, 1])
def test_batches_are_pinned_where_there_is_a_gpu(monkeypatch, marked, loader_workers):
    def means(**options):
        trainer, dataset = augmenting.make(), augmenting.Noisy()
        read = loader_of(dataset, 10, num_workers=loader_workers, **options)
        seen = []
        for step in trainer.run.steps(read, steps=1):
            with step:
                for inputs, labels in step.shards:
                    seen.append(inputs.mean())
                    step.backward(augmenting.loss_of(trainer.run.model, (inputs, labels.abs())))
        predicted = trainer.predict(read, forward=lambda model, batch: batch[0])
        return torch.stack([*seen, predicted.mean()])

    plain = means()
    assert torch.equal(means(pin_memory=True), plain)
    monkeypatch.setattr(loader, "can_pin", lambda: True)
    assert torch.equal(means(), plain)
    assert torch.equal(means(pin_memory=True), -plain)


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_nothing_happens_and_nothing_is_said():
    dataset = augmenting.Noisy()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        trainer = augmenting.make()
        read = loader_of(dataset, 10, pin_memory=True)
        digest = trainer.fit(read, epochs=1, validate=dataset).digest
        trainer.evaluate(read)
        trainer.predict(read)
    assert digest == augmenting.make().fit(dataset, batch_size=10, epochs=1).digest


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
def test_with_a_gpu_tensors_lie_in_pinned_memory():
    assert all(tensor.is_pinned() for tensor in pin([torch.ones(2), torch.zeros(3)]))
