"""`fit` returns the history of the run, with means over samples; several data sets have names."""

import json
import pickle

import pytest
import torch
from tests.classified import by_sign, cross_entropy
from torch import nn
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils.data import DataLoader

import unisono
from unisono.callbacks import BestCheckpoint, EarlyStopping

TRAIN, SEEN, NEW = by_sign(50), by_sign(20), by_sign(13)


def of_positive(model, batch):
    """Average over some samples: as many in one batch as in another they never are."""
    outputs, labels = model(batch[0]), batch[1]
    losses = nn.functional.cross_entropy(outputs, labels, reduction="none")
    hits = (outputs.argmax(1) == labels).sum()
    return {"loss": ((losses * labels).sum(), labels.sum().float() + 1e-9), "hits": hits}


def made(loss=of_positive, lr=0.1, schedule=None, **options):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.2), nn.Linear(8, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    schedule = schedule and schedule(optimizer)
    return unisono.Trainer(model, optimizer, loss, shards=3, schedule=schedule, **options)


def history(**options):
    trainer = made(**options)
    sets = {"seen": SEEN, "new": NEW}
    return trainer.fit(TRAIN, batch_size=8, steps=24, validate=sets, validate_every=5)


def test_a_row_has_the_means_over_the_samples_of_its_epoch():
    # With a rate of 0 and no dropout, an epoch is an evaluation.
    trainer = made(lr=0.0)
    trainer.run.model[1].p = 0.0
    rows = trainer.fit(TRAIN, batch_size=8, epochs=2)
    means = trainer.evaluate(TRAIN, batch_size=50)
    assert [(row["epoch"], row["step"], row["hits"]) for row in rows] == [
        (1, 7, means["hits"]),
        (2, 14, means["hits"]),
    ]
    assert [row["loss"] for row in rows] == pytest.approx([means["loss"]] * 2)


def test_a_row_has_the_newest_validation_of_its_epoch(capsys):
    found = history()
    assert [(row["epoch"], row["step"]) for row in found] == [(1, 7), (2, 14), (3, 21), (4, 24)]
    names = [f"validation/{of}/{name}" for of in ("seen", "new") for name in ("loss", "hits")]
    assert all(list(row) == ["epoch", "step", "loss", "hits", *names] for row in found[:3])
    lines = [line for line in capsys.readouterr().out.splitlines() if "validation" in line]
    of_step = {line.partition(":")[0]: f"{line.partition('seen/loss ')[2]:.6}" for line in lines}
    newest = [of_step[f"step {step}"] for step in (5, 10, 20)]
    assert [f"{row['validation/seen/loss']:.4f}" for row in found[:3]] == newest
    # At the end of a call one is made that was not due, of which a resumed run knows nothing.
    assert names[0] not in found[3]
    assert f"{found.validation['seen/loss']:.4f}" == of_step["step 24"]


def test_a_history_travels_as_what_it_is():
    found = history()
    again = pickle.loads(pickle.dumps(found))
    assert again == found
    assert str(again) == str(found)
    assert json.loads(json.dumps(found)) == found


class Fails:
    """A metric that fails on the second of two data sets."""

    calls = 0

    def __call__(self, outputs, targets):
        self.calls += 1
        if self.calls == 4:
            raise OSError("gone")
        return 1.0


def test_a_run_that_failed_between_two_data_sets_validates_both_again(tmp_path):
    def fit(metric):
        sets = {"seen": SEEN, "new": NEW}
        how = {"validate_every": 5, "validate_metrics": {"it": metric}}
        trainer = made(loss=cross_entropy, directory=tmp_path, checkpoint=4)
        return trainer.fit(TRAIN, batch_size=8, steps=14, validate=sets, **how)

    with pytest.raises(OSError, match="gone"):
        fit(Fails())
    found = fit(lambda outputs, targets: 1.0)
    assert [row["validation/new/it"] for row in found] == [1.0, 1.0]


def test_what_looks_at_validations_names_one_of_several(tmp_path):
    best = BestCheckpoint(tmp_path / "best", monitor="new/loss")
    stopping = EarlyStopping(1, monitor="seen/hits", better="higher", min_delta=100.0)
    trainer = made(
        callbacks=[best, stopping],
        schedule=lambda o: unisono.Schedule(ReduceLROnPlateau(o), monitor="new/loss"),
    )
    sets = {"seen": SEEN, "new": DataLoader(NEW, 4)}
    found = trainer.fit(TRAIN, batch_size=8, epochs=9, validate=sets)
    assert len(found) == 2  # stopped early
    assert best.best == min(row["validation/new/loss"] for row in found)


@pytest.mark.parametrize(
    ("what", "named"),
    [
        ({"callbacks": [EarlyStopping()]}, "EarlyStopping"),
        ({"schedule": ReduceLROnPlateau}, "ReduceLROnPlateau"),
    ],
)
def test_before_the_first_step_whoever_names_none_is_refused(what, named):
    with pytest.raises(ValueError, match=f'{named} .*: pass `monitor="seen/loss"`'):
        history(**what)


@pytest.mark.parametrize("validate", [{}, {"": SEEN}, {"a/b": SEEN}, {1: SEEN}])
def test_names_of_data_sets_are_texts(validate):
    with pytest.raises(ValueError, match=r"in `validate` must be strings .*: pass `\{"):
        made().fit(TRAIN, batch_size=8, epochs=1, validate=validate)


def without_the_last(samples):
    inputs, labels = torch.utils.data.default_collate(samples)
    return inputs[:, :4], labels


def test_passes_read_samples_as_fit_did_unless_it_is_said():
    train, seen = by_sign(50, 5), by_sign(20, 5)
    trainer = made()
    with pytest.raises(TypeError, match="`batch_size` must say"):
        trainer.evaluate(seen)
    loader = DataLoader(train, 8, collate_fn=without_the_last)
    found = trainer.fit(loader, epochs=1, validate=seen)
    means = {f"validation/{name}": value for name, value in trainer.evaluate(seen).items()}
    assert means.items() <= found[-1].items()
    whole = DataLoader(seen, 8, collate_fn=without_the_last)
    assert torch.equal(trainer.predict(seen), trainer.predict(whole))
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        trainer.predict(seen, batch_size=8)


def test_a_loss_of_the_whole_batch_weighs_steps_by_their_samples():
    def values(outputs):
        return {
            "loss": outputs.mean(),
            "big": (outputs > 4).sum(),
            "rate": (outputs > 4).float().mean(),
        }

    rows = torch.utils.data.TensorDataset(torch.arange(10.0).reshape(10, 1))
    for loss in (
        lambda model, batch: values(model(batch[0])),
        unisono.WholeBatch(lambda model, batch: model(batch[0]), lambda model, rows: values(rows)),
    ):
        model = nn.Linear(1, 1)
        nn.init.ones_(model.weight), nn.init.zeros_(model.bias)
        trainer = unisono.Trainer(model, torch.optim.SGD(model.parameters(), lr=0.0), loss)
        (row,) = trainer.fit(rows, batch_size=8, epochs=1, shuffle=False)
        assert (row["loss"], row["big"], row["rate"]) == (4.5, 5, 0.5)
        assert (row["epoch"], row["step"]) == (1, 2)  # whatever the program calls "step"
