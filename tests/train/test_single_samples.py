"""A shard with one sample, which BatchNorm refuses, is told before step 0; the ways out work."""

import contextlib
import io

import pytest
import torch
from tests.classified import at_random
from tests.classified import cross_entropy as loss_of
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import unisono

DATA = at_random(45, 8, 4, seed=3)  # of four shards of the last of batches of 10, one has 2
IMAGES = TensorDataset(DATA.tensors[0].reshape(45, 2, 2, 2), DATA.tensors[1])


class Flat(nn.Sequential):
    data = DATA

    def __init__(self):
        super().__init__(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 4))


class Pooled(nn.Sequential):
    """Its second BatchNorm gets one value per channel of each image."""

    data = IMAGES

    def __init__(self):
        pooled = nn.AdaptiveAvgPool2d(1), nn.BatchNorm2d(6), nn.Flatten(), nn.Linear(6, 4)
        super().__init__(nn.Conv2d(2, 6, 1), nn.BatchNorm2d(6), *pooled)


class Tokens(nn.Module):
    data = DATA

    def __init__(self):
        super().__init__()
        self.norm, self.head = nn.BatchNorm1d(4), nn.Linear(8, 4)

    def forward(self, inputs):
        return self.head(self.norm(inputs.reshape(-1, 4)).reshape(-1, 8))


def make(kind, shards=4):
    torch.manual_seed(0)
    model = kind()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return unisono.Trainer(model, optimizer, loss_of, shards=shards, callbacks=[])


def fitted(kind, *, shards=4, settle=False, loader=False, **how):
    with contextlib.redirect_stdout(io.StringIO()):
        trainer = make(kind, shards)
        if settle:
            for module in trainer.run.model:
                module.train(not isinstance(module, nn.modules.batchnorm._BatchNorm))
        try:
            if loader:
                data = DataLoader(kind.data, 10, shuffle=True, drop_last=True)
                trainer.fit(data, **{"epochs": 2, **how})
            else:
                trainer.fit(kind.data, batch_size=10, **{"epochs": 2, **how})
        except ValueError as error:
            return trainer.run.position.step, str(error)
    return trainer.run.position.step, trainer.digest()


SENTENCE = (
    "BatchNorm must get more than one value per channel in training, but the last batch of an "
    "epoch (5 samples in 4 shards) leaves a shard with a single sample: pass `drop_last=True`, "
    "another `batch_size` or fewer `shards`, or put the layer into `eval()`."
)


def refusals():
    return [fitted(Flat), fitted(Pooled)]


@pytest.mark.slow
def test_it_is_refused_before_the_first_step_everywhere():
    assert refusals() == [(0, SENTENCE)] * 2
    assert unisono.launch(refusals, workers=2) == [[(0, SENTENCE)] * 2] * 2
    assert fitted(Flat, shards=8)[1].startswith(
        "BatchNorm must get more than one value per channel in training, but each batch (10 "
        "samples in 8 shards) leaves a shard with a single sample: pass another `batch_size`"
    )


@pytest.mark.parametrize(
    ("kind", "how"),
    [
        (Tokens, {}),
        (Tokens, {"shards": 8}),  # of which each batch has single samples
        (Flat, {"shards": 2}),
        (Flat, {"settle": True}),
        (Flat, {"epochs": None, "steps": 4}),  # the last batch does not come
        (Flat, {"drop_last": True, "epochs": None, "steps": 10}),
        (Flat, {"loader": True, "epochs": None, "steps": 10}),
    ],
)
def test_what_torch_computes_is_not_refused(kind, how):
    step, _ = fitted(kind, **how)
    assert step == how.get("steps", 10)


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ({"sampler": lambda epoch, seed: [0, 1, 2]}, "`drop_last=True` and a sampler"),
        ({"batch_size": 64}, "must leave one batch of 64 at least, but .* only 45 samples"),
    ],
)
def test_what_leaves_no_last_batch_out_is_refused(how, words):
    with pytest.raises(ValueError, match=words):
        make(Flat).fit(DATA, **{"batch_size": 10, "epochs": 1, "drop_last": True, **how})
    with pytest.raises(ValueError, match="`drop_last` must be left out where a DataLoader"):
        make(Flat).fit(DataLoader(DATA, 10), epochs=1, drop_last=True)
