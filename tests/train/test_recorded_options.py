"""A run that goes on says which options of the program it overrules, or takes them."""

import functools

import pytest
import torch
from tests.classified import cross_entropy as loss
from tests.classified import taken
from tests.promises import promise
from torch import nn
from torch.optim import SGD, Adam
from torch.optim.lr_scheduler import (
    ChainedScheduler,
    ConstantLR,
    CosineAnnealingLR,
    LambdaLR,
    LinearLR,
    OneCycleLR,
    PolynomialLR,
    ReduceLROnPlateau,
    SequentialLR,
    StepLR,
)
from torch.utils.data import TensorDataset

import unisono

EPOCH = 4  # steps


def data():
    inputs = torch.randn(40, 4, generator=torch.Generator().manual_seed(1))
    return TensorDataset(inputs, (inputs[:, 0] > 0).long())


def groups_of(model, names=()):
    if not names:
        return model.parameters()
    groups = [{"params": layer.parameters()} for layer in model]
    return [{**group, **more} for group, more in zip(groups, names, strict=True)]


def make(directory, optimizer=SGD, *, groups=(), schedule=None, fixed=False, every="step", **rest):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
    model[1].bias.requires_grad_(not fixed)
    options = {name: rest.pop(name) for name in [*rest] if name != "checkpoint"}
    made = optimizer(groups_of(model, groups), **{"lr": 0.1, **options})
    rest |= {} if schedule is None else {"schedule": unisono.Schedule(schedule(made), every=every)}
    return unisono.Trainer(model, made, loss, shards=2, directory=directory, **rest)


PROGRAMS = unisono.Checkpoint(options="program")


def train(directory, steps, **options):
    trainer = make(directory, **options)
    summary = trainer.fit(data(), batch_size=10, steps=steps)
    return summary.digest


def told(capsys):
    return [line for line in capsys.readouterr().out.splitlines() if "the options" in line]


@promise("conditions.5")
@pytest.mark.slow
@pytest.mark.parametrize(
    ("before", "now", "said"),
    [
        ({}, {"lr": 0.01}, "lr: 0.01 given, 0.1 kept"),
        ({}, {"lr": 0.01, "momentum": 0.9}, "lr: 0.01 given, 0.1 kept; momentum: 0.9 given, 0"),
        (
            {"optimizer": Adam},
            {"optimizer": Adam, "betas": (0.8, 0.9), "amsgrad": True},
            "betas: [0.8, 0.9] given, [0.9, 0.999] kept; amsgrad: True given, False kept",
        ),
        (
            {"groups": [{}, {"lr": 0.5}]},
            {"groups": [{"lr": 0.2}, {"lr": 0.5}]},
            "lr of group 0: 0.2 given, 0.1 kept",
        ),
        (
            {"groups": [{"name": "body"}, {"name": "head"}]},
            {"groups": [{"name": "body"}, {"name": "head", "weight_decay": 0.1}]},
            "weight_decay of group head: 0.1 given, 0 kept",
        ),
        (
            {"schedule": functools.partial(StepLR, step_size=2)},
            {"schedule": functools.partial(StepLR, step_size=2), "lr": 0.3},
            "lr: 0.3 given, 0.1 kept.",
        ),
        (
            {"schedule": functools.partial(StepLR, step_size=2)},
            {"schedule": functools.partial(StepLR, step_size=3, gamma=0.5)},
            "step_size of `schedule`: 3 given, 2 kept; gamma of `schedule`: 0.5 given, 0.1 kept",
        ),
        ({}, {"fixed": True}, "requires_grad of `1.bias`: False given, True kept"),
    ],
)
def test_what_is_given_and_overruled_is_said_once(tmp_path, capsys, before, now, said):
    train(tmp_path, 3, **before)
    assert told(capsys) == []
    kept = train(tmp_path, 6, **now)
    (line,) = told(capsys)
    assert line.startswith("the run continues with the options that it began with: " + said)
    assert '`Checkpoint(options="program")`' in line
    assert kept == train(None, 6, **before)
    train(tmp_path, 7, **now)
    assert len(told(capsys)) == 1  # still overruled
    train(tmp_path, 8, **before)
    assert told(capsys) == []


SCHEDULES = {
    "none": None,
    "steps": functools.partial(StepLR, step_size=2, gamma=0.5),
    "cosine": functools.partial(CosineAnnealingLR, T_max=8, eta_min=0.01),
    "lambda": functools.partial(LambdaLR, lr_lambda=lambda epoch: 1 / (1 + epoch)),
    "one cycle": functools.partial(OneCycleLR, max_lr=0.5, total_steps=20),
    "sequence": lambda optimizer: SequentialLR(
        optimizer, [LinearLR(optimizer, 0.1, total_iters=3), StepLR(optimizer, 2)], [3]
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("every", ["step", "epoch"])
def test_how_far_a_schedule_has_come_is_no_change_of_the_program(tmp_path, capsys, schedule, every):
    options = {"schedule": SCHEDULES[schedule], "every": every, "momentum": 0.9}
    for steps in (3, 6, 10):
        digest = train(tmp_path, steps, **options)
        assert told(capsys) == []
    assert digest == train(None, 10, **options)


@promise("conditions.5")
@pytest.mark.slow
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_what_the_program_gives_is_taken_where_it_asks_for_that(tmp_path, capsys, schedule):
    options = {"schedule": SCHEDULES[schedule], "momentum": 0.9}
    train(tmp_path, 5, **options)
    trainer = make(tmp_path, checkpoint=PROGRAMS, lr=0.02, weight_decay=0.1, **options)
    trainer.fit(data(), batch_size=10, steps=5)
    assert "lr: 0.02, was 0.1" in (out := capsys.readouterr().out) or schedule == "one cycle"
    assert "weight_decay: 0.1, was 0" in out
    whole = make(None, lr=0.02, **options)
    whole.fit(data(), batch_size=10, steps=5)
    (there,), (here,) = (t.run.optimizer.param_groups for t in (whole, trainer))
    for name in ("lr", "initial_lr", "momentum"):
        assert here.get(name) == there.get(name)
    assert here["weight_decay"] == 0.1
    trainer.fit(data(), batch_size=10, steps=9)
    whole.fit(data(), batch_size=10, steps=9)
    assert here["lr"] == there["lr"]
    train(tmp_path, 10, **options, lr=0.02, weight_decay=0.1)
    assert told(capsys) == []  # what was taken is what the run has now


@pytest.mark.slow
@pytest.mark.parametrize(
    ("schedule", "horizon"),
    [(CosineAnnealingLR, "T_max"), (LinearLR, "total_iters"), (PolynomialLR, "total_iters")],
)
def test_a_longer_run_has_the_rates_of_a_longer_schedule_if_asked(tmp_path, schedule, horizon):
    def rates(directory, steps, length, **options):
        seen = []

        class Notes(unisono.callbacks.Callback):
            def on_step_begin(self, fit):
                seen.append(fit.optimizer.param_groups[0]["lr"])

        made = functools.partial(schedule, **{horizon: length})
        trainer = make(directory, schedule=made, **options)
        trainer.callbacks.append(Notes())
        trainer.fit(data(), batch_size=10, steps=steps)
        return seen

    for directory, length, options in (("kept", 6, {}), ("longer", 12, {"checkpoint": PROGRAMS})):
        rates(tmp_path / directory, 6, 6)
        found = rates(tmp_path / directory, 12, 12, **options)[-6:]
        assert found == pytest.approx(rates(None, 12, length)[6:])


def test_what_the_program_has_not_changed_stays_as_it_was_in_the_checkpoint(tmp_path):
    trainer = make(tmp_path, momentum=0.9)
    for _ in taken(trainer.run, loss, data(), batch_size=10, steps=3):
        trainer.run.optimizer.param_groups[0]["momentum"] *= 0.5
    trainer = make(tmp_path, momentum=0.9, lr=0.3, fixed=True, checkpoint=PROGRAMS)
    trainer.fit(data(), batch_size=10, steps=3)
    (group,) = trainer.run.optimizer.param_groups
    assert (group["lr"], group["momentum"]) == (0.3, 0.9 * 0.5**3)
    assert not trainer.run.model[1].bias.requires_grad


def test_a_plateaus_rate_changes_in_proportion(tmp_path):
    def fit(lr, **options):
        made = functools.partial(ReduceLROnPlateau, factor=0.5, patience=0, threshold=1e9)
        trainer = make(tmp_path, schedule=made, every="epoch", lr=lr, **options)
        trainer.fit(data(), batch_size=10, epochs=3, validate=data())
        return trainer.run.optimizer.param_groups[0]["lr"]

    rate = fit(0.1)
    assert rate < 0.1
    assert fit(0.2, checkpoint=PROGRAMS) == pytest.approx(2 * rate)


def test_a_chains_rate_is_taken_from_the_program(tmp_path):
    def rate(directory, lr, steps, **options):
        def chain(optimizer):
            return ChainedScheduler([ConstantLR(optimizer, 0.1, 2), StepLR(optimizer, 3)])

        trainer = make(directory, schedule=chain, lr=lr, **options)
        trainer.fit(data(), batch_size=10, steps=steps)
        return trainer.run.optimizer.param_groups[0]["lr"]

    rate(tmp_path, 0.1, 4)
    found = rate(tmp_path, 0.2, 5, checkpoint=PROGRAMS)
    assert found == pytest.approx(rate(None, 0.2, 5))


def test_a_run_says_what_is_overruled(tmp_path, capsys):
    for lr, steps in ((0.1, 3), (0.2, 4)):
        torch.manual_seed(0)
        model = nn.Linear(4, 2)
        run = unisono.Run(model, SGD(model.parameters(), lr=lr), shards=1, directory=tmp_path)
        list(run.steps(data(), batch_size=10, steps=0))
        list(taken(run, loss, data(), batch_size=10, steps=steps))
    assert "lr: 0.2 given, 0.1 kept" in capsys.readouterr().err


def test_a_run_that_is_finished_says_so(tmp_path, capsys):
    first = train(tmp_path, 3)
    assert "already finished" not in capsys.readouterr().out
    assert train(tmp_path, 3) == first
    out = capsys.readouterr().out
    assert out.count("the run is already finished, at epoch 0 and") == 1
    assert 'to start over, pass `Checkpoint(resume="never")`' in out


def test_further_fits_with_the_same_total_say_once_that_nothing_is_to_do(capsys):
    trainer = make(None)
    trainer.fit(data(), batch_size=10, epochs=2)
    assert "already finished" not in capsys.readouterr().out
    for _ in range(3):
        trainer.fit(data(), batch_size=10, epochs=2)
    out = capsys.readouterr().out
    words = (
        f"epoch 2 and step 8, digest {trainer.digest()[:16]}, with `epochs=2`: to train as much "
        f"again, pass `epochs=4`, as"
    )
    assert out.count(words) == 1
    assert "anew" not in out


def resumed(directory, lr):
    train(directory, 3)
    return train(directory, 6, lr=lr, checkpoint=PROGRAMS)


@pytest.mark.slow
def test_workers_take_options_alike_and_say_it_once(tmp_path, capfd):
    (alone,) = unisono.launch(resumed, tmp_path / "1", 0.02, workers=1)
    capfd.readouterr()
    assert unisono.launch(resumed, tmp_path / "2", 0.02, workers=2) == [alone] * 2
    assert capfd.readouterr().out.count("lr: 0.02, was 0.1") == 1
