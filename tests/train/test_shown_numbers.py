"""What a reader sees and monitors: training loss, counts, ratios; names are looked at early."""

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import unisono

X = torch.randn(60, 6, generator=torch.Generator().manual_seed(0))
DATA = TensorDataset(X, (X.sum(1) > 0).long())
HELD_OUT = TensorDataset(X[:25].flip(0), (X[:25].flip(0).sum(1) > 0.5).long())


def dice_of(model, inputs, labels):
    """Give twice the overlap, and the sum of both areas, of all samples."""
    found = model(inputs).argmax(1)
    return 2 * (found & labels).sum(), found.sum() + labels.sum()


def loss_of(model, batch):
    inputs, labels = batch
    loss = nn.functional.cross_entropy(model(inputs), labels)
    area = model(inputs).argmax(1).sum()
    return {"loss": loss, "area": area, "dice": dice_of(model, inputs, labels)}


def make(**options):
    torch.manual_seed(1)
    model = nn.Linear(6, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    return unisono.Trainer(model, optimizer, loss_of, **options)


def in_a_plain_loop(epochs):
    torch.manual_seed(1)
    model = nn.Linear(6, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    lines, ratios = [], []
    for epoch in range(epochs):
        total = 0.0
        for at in range(0, len(DATA), 16):
            inputs, labels = DATA[at : at + 16]
            loss = nn.functional.cross_entropy(model(inputs), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += loss.item() * len(inputs)
        inputs, labels = HELD_OUT.tensors
        with torch.no_grad():
            found = nn.functional.cross_entropy(model(inputs), labels).item()
            area = int(model(inputs).argmax(1).sum())
            twice, both = dice_of(model, inputs, labels)
        ratios.append(twice.item() / both.item())
        lines.append(
            f"epoch {epoch + 1}: validation loss {found:.4f}, area {area}, dice {ratios[-1]:.4f}; "
            f"training loss {total / len(DATA):.4f}"
        )
    return lines, ratios


@pytest.mark.parametrize("shards", [1, 3])
def test_an_epochs_line_has_the_numbers_of_a_plain_loop(capsys, shards):
    lines, ratios = in_a_plain_loop(3)
    stopping = unisono.callbacks.EarlyStopping(3, monitor="dice", better="higher")
    trainer = make(shards=shards, callbacks=stopping)
    history = trainer.fit(DATA, batch_size=16, epochs=3, shuffle=False, validate=HELD_OUT)
    shown = capsys.readouterr().out.splitlines()
    assert [line for line in shown if line.startswith("epoch")] == lines
    assert stopping.best == max(ratios)
    assert [row["validation/dice"] for row in history] == ratios
    assert all(type(row["area"]) is type(row["validation/area"]) is int for row in history)


def test_a_validation_within_an_epoch_has_no_training_loss_yet(capsys):
    make(shards=2).fit(DATA, batch_size=16, steps=3, validate=HELD_OUT, validate_every=2)
    lines = [line for line in capsys.readouterr().out.splitlines() if "validation" in line]
    assert len(lines) == 2
    assert not any("training" in line for line in lines)


def count_of_ones(outputs, targets):
    return targets.sum()


def test_what_a_metric_counts_is_a_count():
    found = make().evaluate(HELD_OUT, batch_size=9, metrics={"ones": count_of_ones})
    assert type(found["ones"]) is type(found["area"]) is int
    assert found["ones"] == HELD_OUT.tensors[1].sum()


@pytest.mark.parametrize("monitor", ["accuracy", "seen/accuracy"])
def test_a_name_that_nothing_has_is_refused_after_the_first_step(monitor):
    trainer = make(shards=2, callbacks=unisono.callbacks.EarlyStopping(monitor=monitor))
    validate = {"seen": HELD_OUT} if "/" in monitor else HELD_OUT
    with pytest.raises(ValueError, match=f"`monitor` must be one of .*but is '{monitor}'"):
        trainer.fit(DATA, batch_size=16, epochs=2, validate=validate)
    assert trainer.run.position.step == 1


def only_in_eval(model, batch):
    found = loss_of(model, batch)
    return found if model.training else {**found, "late": found["loss"].detach()}


def test_names_of_validations_and_of_metrics_alone_are_known():
    for monitor in ("late", "ones"):
        torch.manual_seed(1)
        model = nn.Linear(6, 2)
        trainer = unisono.Trainer(
            model,
            torch.optim.SGD(model.parameters(), lr=0.3),
            only_in_eval,
            shards=2,
            callbacks=unisono.callbacks.EarlyStopping(monitor=monitor),
        )
        trainer.fit(
            DATA,
            batch_size=16,
            epochs=2,
            validate=HELD_OUT,
            validate_metrics={"ones": count_of_ones},
        )
        assert trainer.run.position.epoch == 2


def test_metrics_of_no_validation_are_refused():
    with pytest.raises(ValueError, match="`validate` must be given where `validate_metrics`"):
        make().fit(DATA, batch_size=16, epochs=1, validate_metrics={"ones": count_of_ones})
