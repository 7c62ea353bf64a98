"""Programs that change parameters themselves: a plain loop's bits, and refusals.

What they come to in every way of running them is in the catalogue (`tests.programs`).
"""

import pytest
import torch
from tests.classified import at_random
from tests.classified import cross_entropy as loss_of
from tests.programs.given import Moved, Twins
from tests.promises import promise
from torch import nn
from torch.optim import SGD, Adam

import unisono


def data():
    return at_random(43, 8, 4, seed=3)


def net():
    return nn.Sequential(nn.Linear(8, 150), nn.ReLU(), nn.Linear(150, 4))


def make(model=net, optimizer=Adam, loss=loss_of, **options):
    torch.manual_seed(0)
    model = model()
    made = optimizer([p for p in model.parameters() if p.requires_grad], lr=0.01)
    return unisono.Trainer(model, made, loss, shards=4, **options)


def in_data(weight):
    weight.data.mul_(0.9)


def anew(weight):
    weight.data = weight.data * 0.9


def by_version(weight):
    with torch.no_grad():
        weight.mul_(0.9)


@promise("one-result.10")
@pytest.mark.slow
@pytest.mark.parametrize("change", [in_data, anew, by_version])
@pytest.mark.parametrize("workers", [None, 2])
def test_passes_that_change_trained_parameters_are_refused(change, workers):
    def loss(model, batch):
        change(model[2].weight)
        return loss_of(model, batch)

    def train():
        make(loss=loss).fit(data(), batch_size=10, steps=2)

    with pytest.raises(RuntimeError, match=r"passes must leave .* but `2\.weight` was changed"):
        train() if workers is None else unisono.launch(train, workers=workers)


@pytest.mark.parametrize("of_whole_batch", [False, True])
def test_a_frozen_parameter_that_passes_move_must_be_left_out_of_the_optimizer(of_whole_batch):
    """As MoCo's key encoder, where the optimizer gets `model.parameters()`."""

    def embed(model, batch):
        return model(batch[0])

    def whole(model, rows):
        return rows.square().mean()

    model = Moved(net)
    loss = unisono.WholeBatch(embed, whole) if of_whole_batch else loss_of
    trainer = unisono.Trainer(model, SGD(model.parameters(), lr=0.1), loss, shards=4)
    with pytest.raises(RuntimeError, match=r"`target\..* was changed: pass the optimizer only"):
        trainer.fit(data(), batch_size=10, steps=2)


def test_what_passes_move_has_the_bits_of_a_plain_loop():
    ours, plain, batches = make(lambda: Moved(net), SGD).run.model, Moved(net), []
    plain.load_state_dict(ours.state_dict())
    run = unisono.Run(ours, SGD(ours.net.parameters(), lr=0.1), shards=1)
    for step in run.steps(data(), batch_size=10, steps=4):
        with step:
            for batch in step.shards:
                batches.append(batch)
                step.backward(loss_of(ours, batch))
    optimizer = SGD(plain.net.parameters(), lr=0.1)
    for batch in batches:
        optimizer.zero_grad()
        loss_of(plain, batch).backward()
        optimizer.step()
    for here, there in zip(ours.parameters(), plain.parameters(), strict=True):
        assert torch.equal(here, there)


@pytest.mark.parametrize("change", [in_data, anew, by_version])
@pytest.mark.parametrize("begin", [4, 5])
def test_what_passes_move_late_is_refused(change, begin):
    """In step 4 it is rehearsed, too, but only what is changed by assignment is put back."""

    def loss(model, batch):
        if unisono.progress().step >= begin:
            change(model.target[2].weight)
        return loss_of(model, batch)

    with pytest.raises(RuntimeError, match=r"`target\.2\.weight` (was first seen|carries)"):
        make(lambda: Twins(net), SGD, loss).fit(data(), batch_size=10, steps=66)


class Written(nn.Sequential):
    """Writes to its weight in each pass what is there already."""

    def forward(self, images):
        self[0].weight.data.clamp_(-100.0, 100.0)
        return super().forward(images)


def test_what_a_pass_writes_without_a_change_hides_no_update(monkeypatch):
    found = set()
    for model in (net, lambda: Written(*net())):
        for exchange in ("shared", "staged"):
            monkeypatch.setenv("UNISONO_EXCHANGE", exchange)
            trainer = make(model, optimizer=SGD)
            trainer.fit(data(), batch_size=8, steps=6)
            values = [value.tolist() for value in trainer.run.model.state_dict().values()]
            found.add(str(values))
    assert len(found) == 1
