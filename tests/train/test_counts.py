"""What a loss returns as an integer is a count: added up, in training as in evaluation."""

import contextlib
import io

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from tests.classified import at_random

import unisono

DATA = at_random(30, 8, 4, seed=3)


def counting(model, batch):
    inputs, targets = batch
    outputs = model(inputs)
    right = outputs.argmax(1) == targets
    return {
        "loss": F.cross_entropy(outputs, targets),
        "correct": right.sum(),
        "same": int(right.sum()),  # as Python's
        "too": np.int64(right.sum().item()),
        "zeros": (targets == 0).sum(),
        "passes": True,
        "accuracy": right.float().mean(),
    }


def of_all_rows(model, features):
    outputs, targets = features
    return counting(lambda _: outputs, (outputs, targets)) | {"passes": False}


def embed(model, batch):
    return model(batch[0]), batch[1]


def make(loss=counting, **options):
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return unisono.Trainer(model, optimizer, loss, **options)


def means(shards, **options):
    with contextlib.redirect_stdout(io.StringIO()):
        trainer = make(shards=shards, **options)
        found = trainer.evaluate(DATA, batch_size=20)
        return trainer.fit(DATA, batch_size=20, steps=1, shuffle=False).means, found


@pytest.mark.parametrize("options", [{}, {"loss": unisono.WholeBatch(embed, of_all_rows)}])
def test_counts_are_added_up_whatever_the_shards(options):
    torch.manual_seed(0)
    whole = counting(torch.nn.Linear(8, 4), DATA.tensors)
    first = counting(torch.manual_seed(0) and torch.nn.Linear(8, 4), DATA[:20])
    for shards in (1, 2, 4):
        step, found = means(shards, **options)
        for name in ("correct", "same", "too", "zeros"):
            assert (step[name], found[name]) == (first[name], whole[name])
        assert found["accuracy"] == pytest.approx(whole["accuracy"].item())
        if not options:
            assert (step["passes"], found["passes"]) == (shards, 2)


@pytest.mark.slow
def test_all_workers_have_the_same_counts():
    assert unisono.launch(means, 4, workers=2) == [means(4)] * 2


def test_all_devices_have_the_same_counts(accelerator):
    assert [found["correct"] for found in means(4, device="sim:0")] == [
        found["correct"] for found in means(4)
    ]


@pytest.mark.parametrize("name", ["fit", "evaluate"])
def test_what_is_a_count_now_and_then_is_refused(name):
    def loss(model, batch):
        found = F.cross_entropy(model(batch[0]), batch[1])
        return {"loss": found, "extra": found.detach() if 3 in batch[1] else 0}

    data = torch.utils.data.TensorDataset(torch.ones(8, 8), torch.tensor([3, 0, 0, 0] * 2))
    how = {"batch_size": 1}
    if name == "fit":
        how = {"batch_size": 8, "steps": 1, "shuffle": False}
    with pytest.raises(
        unisono.errors.MismatchError, match=r"as an integer \(a count\) (always )?or never"
    ):
        getattr(make(loss, shards=2), name)(data, **how)
    with pytest.raises(
        unisono.errors.MismatchError, match=r"as an integer \(a count\) (always )?or never"
    ):
        make(loss, shards=1).evaluate(data, batch_size=1)  # in one shard
