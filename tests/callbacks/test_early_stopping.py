"""Early stopping: decided once, by what validations found, on any number of workers."""

import pytest
import torch
from tests.classified import cross_entropy as loss
from tests.classified import taken
from torch.utils.data import TensorDataset

import unisono
from unisono.callbacks import EarlyStopping


class Fit:
    has_ended = False

    def __init__(self):
        self.why = []

    def stop(self, why):
        self.why.append(why)

    def judge(self, rule, means):
        before = len(self.why)
        rule.on_validation(self, means, 0.0)
        return self.why[before:]


@pytest.mark.parametrize(
    ("options", "means", "stops_after"),
    [
        ({"patience": 1}, [3.0, 2.0, 2.0, 1.0], 3),
        ({"patience": 2}, [3.0, 4.0, 2.0, 2.5, 2.0, 1.0], 5),
        ({"patience": 2}, [3.0, 4.0, 2.0, 2.5, 1.0], None),
        ({"patience": 1, "better": "higher"}, [1.0, 2.0, 1.5], 3),
        ({"patience": 1, "min_delta": 0.5}, [3.0, 2.4, 2.0], 3),
        ({"patience": 2}, [float("nan"), 3.0, float("nan"), 2.0], None),
        ({"patience": 2}, [1.0, float("nan"), float("nan")], 3),
        ({"patience": 2}, [float("nan"), float("nan"), float("nan")], 3),
    ],
)
def test_patience(options, means, stops_after):
    rule, fit = EarlyStopping(**options), Fit()
    stopped = [n for n, mean in enumerate(means, 1) if fit.judge(rule, {"loss": mean})]
    assert (stopped[0] if stopped else None) == stops_after


@pytest.mark.parametrize(
    ("options", "kind", "words"),
    [
        ({"patience": 0}, ValueError, "`patience`"),
        ({"patience": 1.5}, TypeError, "`patience`"),
        ({"better": "small"}, ValueError, "`better` must be one of"),
        ({"min_delta": -1.0}, ValueError, "`min_delta` must be at least 0"),
    ],
)
def test_wrong_options_are_refused(options, kind, words):
    with pytest.raises(kind, match=words):
        EarlyStopping(**options)


def data(num_samples):
    x = torch.randn(num_samples, 6, generator=torch.Generator().manual_seed(num_samples))
    labels = torch.randint(2, (num_samples,), generator=torch.Generator().manual_seed(5))
    return TensorDataset(x, labels)  # nothing to be learned


RULE = {"patience": 2, "min_delta": 0.02}


def make(rules, **options):
    torch.manual_seed(4)
    model = torch.nn.Sequential(torch.nn.Linear(6, 32), torch.nn.ReLU(), torch.nn.Linear(32, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    return unisono.Trainer(model, optimizer, loss, shards=3, callbacks=rules, **options)


def train(epochs=40, rule=RULE, **options):
    trainer = make([EarlyStopping(**rule)] if rule else [], **options)
    trainer.fit(data(40), batch_size=10, epochs=epochs, validate=data(31))
    return trainer.run.position.epoch, trainer.digest()


def test_a_run_ends_when_validations_get_no_better(capsys):
    epoch, _ = train()
    assert 2 < epoch < 40
    said = capsys.readouterr().out
    assert said.count("stopping early: loss was") == 1
    assert "and in 2 validations not 0.02 lower" in said


@pytest.mark.slow
def test_workers_and_losses_of_them_change_nothing(monkeypatch):
    alone = train()
    faults = f"kill:rank=1,step=5; kill:rank=0,step={4 * alone[0] - 1},at=update"
    monkeypatch.setenv("UNISONO_FAULTS", faults)
    assert unisono.launch(train, workers=3) == [alone] * 3


@pytest.mark.slow
def test_a_stopped_run_stays_stopped_and_goes_on_if_wanted(tmp_path):
    undisturbed = train()
    train(epochs=2, directory=tmp_path)
    assert train(directory=tmp_path) == undisturbed
    assert train(directory=tmp_path) == undisturbed
    assert train(epochs=12, directory=tmp_path, rule=None)[0] == 12


def test_another_rule_begins_anew():
    fit, means = Fit(), {"loss": 0.5, "accuracy": 0.1}
    first, same = EarlyStopping(1), EarlyStopping(1)
    other = EarlyStopping(1, monitor="accuracy", better="higher")
    assert not fit.judge(first, means)
    for rule in (same, other):
        rule.load_state_dict(first.state_dict())
    assert fit.judge(same, means)
    assert not fit.judge(other, means)
    assert fit.judge(other, means)


def test_a_run_that_was_stopped_goes_on_where_it_is_told_to(tmp_path, capsys):
    def steps(go_on, stop_at=None):
        torch.manual_seed(4)
        model = torch.nn.Linear(6, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        run = unisono.Run(model, optimizer, shards=1, directory=tmp_path)
        if go_on:
            run.go_on()
        seen = []
        for step in taken(run, loss, data(40), batch_size=10, steps=8):
            seen.append(step.number)
            if step.number == stop_at:
                run.stop()
        return seen

    assert steps(False, stop_at=2) == [0, 1, 2]
    assert steps(False) == [0, 1, 2]  # what the loop left, and no step more
    assert "the run was stopped at step 3 and stays there" in capsys.readouterr().err
    assert steps(True) == [0, 1, 2, 3, 4, 5, 6, 7]  # the list belongs to the run


@pytest.mark.parametrize("splits", [[20], [7, 20], [4, 7, 20]])
def test_where_a_run_was_split_does_not_change_where_it_ends(tmp_path, splits):
    def fit(steps):
        torch.manual_seed(4)
        model = torch.nn.Linear(6, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)  # nothing gets better
        trainer = unisono.Trainer(
            model, optimizer, loss, shards=1, directory=tmp_path, callbacks=[EarlyStopping(2)]
        )
        trainer.fit(data(40), batch_size=10, steps=steps, validate=data(31), validate_every=3)
        return trainer.run.position.step

    assert [fit(steps) for steps in splits][-1] == 9


KEPT = unisono.Checkpoint(3, keep=1)


def train_twice(directory):
    rule = EarlyStopping(**RULE)
    trainer = make([rule], directory=directory, checkpoint=KEPT)
    trainer.fit(data(40), batch_size=10, epochs=40, validate=data(31))
    trainer.callbacks.remove(rule)
    where = trainer.run.position.step
    trainer.fit(data(40), batch_size=10, epochs=40)
    return where, trainer.digest()


@pytest.mark.slow
def test_a_replacement_knows_of_a_stop_before_the_restart(tmp_path, monkeypatch):
    alone = train_twice(tmp_path / "alone")
    first = unisono.launch(train, workers=2)[0]
    train(directory=tmp_path / "both", checkpoint=KEPT)
    # The second start has nothing to do in its first fit; what says so is gone from the disk.
    monkeypatch.setenv("UNISONO_FAULTS", f"kill:rank=1,step={4 * first[0] + 20}")
    assert unisono.launch(train_twice, tmp_path / "both", workers=2) == [alone] * 2
