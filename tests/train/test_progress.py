"""`unisono.progress()` says where the run is, the same on any number of workers."""

import queue

import pytest
import torch
from tests.classified import at_random
from tests.promises import promise
from torch import nn
from torch.utils.data import Dataset

import unisono
from unisono.runtime.training_progress import Now, now


def numbers():
    """What it says, in a tensor; 9 for no shard."""
    at = unisono.progress()
    return torch.tensor([at.step, at.epoch, at.batch, 9 if at.shard is None else at.shard]) / 10


class Told(Dataset):
    def __init__(self):
        self.inputs, self.labels = at_random(22, 4, 4, seed=3).tensors

    def __len__(self):
        return 22

    def __getitem__(self, index):
        return self.inputs[index] + numbers(), self.labels[index]


class Noting(unisono.callbacks.Callback):
    def __init__(self):
        self.seen = []

    def on_step_end(self, fit, step):
        self.seen.append((step.number, unisono.progress()))


@promise("one-result.9")
def test_each_place_is_told_as_it_is():
    queued, noting = queue.SimpleQueue(), Noting()  # which may grow, as nobody sees it

    def loss(model, batch):
        queued.put((unisono.progress(), batch[0][:, 0].tolist()))
        return model(batch[0]).sum()

    class Plain(Told):
        def __getitem__(self, index):
            return numbers(), index

    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trainer = unisono.Trainer(model, optimizer, loss, shards=2, callbacks=[noting])
    trainer.fit(Plain(), batch_size=11, steps=3)
    seen = [queued.get() for _ in range(queued.qsize())]
    places = dict.fromkeys((at.step, at.epoch, at.batch, at.shard) for at, _ in seen)
    assert list(places) == [(s, s // 2, s % 2, v) for s in range(3) for v in range(2)]
    assert all(round(steps[0] * 10) == at.step for at, steps in seen)
    assert [(n, at.step, at.shard) for n, at in noting.seen] == [(n, n, None) for n in range(3)]
    trainer.evaluate(Plain(), batch_size=11)
    seen = [queued.get() for _ in range(queued.qsize())]
    places = dict.fromkeys((at.step, at.epoch, at.batch, at.shard) for at, _ in seen)
    assert list(places) == [(3, 1, b, 0) for b in range(2)]


def test_outside_of_a_run_all_are_zero(monkeypatch):
    # Another test may have left a loop of its own by an exception, whose traceback still holds it.
    monkeypatch.setattr(now(), "at", Now().at)
    at = unisono.progress()
    assert (at.step, at.epoch, at.batch, at.shard) == (0, 0, 0, None)
    assert Told()[3][0].shape == (4,)  # so a data set can be indexed by hand
    with pytest.raises(AttributeError):
        at.step = 3
