"""Schedules of learning rates: torch's, stepped by steps and epochs of the run."""

import pytest
import torch
from tests.classified import by_sign
from tests.classified import cross_entropy as loss
from tests.parity.plain import check_bits, plain_loop, trained
from torch.optim import lr_scheduler

import unisono

SCHEDULES = {
    "cosine": (lambda optimizer: lr_scheduler.CosineAnnealingLR(optimizer, 3, 1e-6), "epoch"),
    "one cycle": (lambda optimizer: lr_scheduler.OneCycleLR(optimizer, 0.1, 12), "step"),
    "lambda": (lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda n: 1 / (1 + n)), "step"),
    "chained": (  # the second begins after the checkpoint
        lambda optimizer: lr_scheduler.SequentialLR(
            optimizer,
            [
                lr_scheduler.LinearLR(optimizer, total_iters=2),
                lr_scheduler.MultiStepLR(optimizer, [0, 1]),
            ],
            [2],
        ),
        "epoch",
    ),
    "plateau": (  # looks for a loss that falls by ten, and finds none
        lambda optimizer: lr_scheduler.ReduceLROnPlateau(
            optimizer, patience=0, threshold=10.0, threshold_mode="abs"
        ),
        "epoch",
    ),
}
BATCH = 16
pytestmark = pytest.mark.filterwarnings("ignore:The epoch parameter in")  # SequentialLR's own


def data(num_samples=60):
    return by_sign(num_samples, 6, seed=2)


def make(name, shards, **options):
    torch.manual_seed(4)
    model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    make_schedule, interval = SCHEDULES[name]
    return unisono.Trainer(
        model,
        optimizer,
        loss,
        shards=shards,
        schedule=unisono.Schedule(make_schedule(optimizer), every=interval),
        **options,
    )


def train(name, steps=12, **options):
    trainer = make(name, 3, **options)
    trainer.fit(data(), batch_size=BATCH, steps=steps, validate=data(23))
    return trainer.digest(), trainer.run.optimizer.param_groups[0]["lr"]


@pytest.mark.parametrize("name", ["cosine", "one cycle", "lambda", "chained"])
def test_one_shard_has_the_bits_of_a_plain_loop(name):
    make_schedule, every = SCHEDULES[name]
    steps = 12 if every == "step" else 21  # an epoch has 7
    how = {"schedule": make_schedule, "schedule_every": every}
    trainer = trained("cnn", "adamw", 1, steps, **how)
    check_bits(trainer, plain_loop("cnn", "adamw", steps, **how))
    assert trainer.run.optimizer.param_groups[0]["lr"] != 1e-2


def test_another_schedule_than_the_checkpoints_is_told(tmp_path, capsys):
    train("lambda", 4, directory=tmp_path)
    train("one cycle", 5, directory=tmp_path)
    told = capsys.readouterr().out
    assert "schedule was 'LambdaLR every step' in the checkpoint and is 'OneCycleLR every s" in told


def test_a_plateau_is_judged_by_what_validation_finds():
    trainer = make("plateau", 1)
    group = trainer.run.optimizer.param_groups[0]
    trainer.fit(data(), batch_size=BATCH, epochs=1, validate=data(23))
    assert group["lr"] == 0.05
    trainer.fit(data(), batch_size=BATCH, epochs=2, validate=data(23))
    assert group["lr"] == pytest.approx(0.005)
    often = make("plateau", 1)
    often.fit(data(), batch_size=BATCH, epochs=2, validate=data(23), validate_every=2)
    assert often._schedule._scheduler.last_epoch == 4  # 8 steps: once for each validation
    with pytest.raises(ValueError, match="`validate` must be given for ReduceLROnPlateau"):
        make("plateau", 1).fit(data(), batch_size=BATCH, epochs=2)


@pytest.mark.parametrize(("mode", "rate"), [("max", 0.05), ("min", 0.0005)])
def test_a_plateau_may_look_at_another_mean(mode, rate):
    torch.manual_seed(4)
    model = torch.nn.Linear(6, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    grows = iter(range(99))

    def loss_and_count(model, batch):
        count = 0 if model.training else next(grows)
        return {"loss": loss(model, batch), "count": float(count)}

    plateau = lr_scheduler.ReduceLROnPlateau(optimizer, mode, patience=0)
    schedule = unisono.Schedule(plateau, monitor="count")
    trainer = unisono.Trainer(model, optimizer, loss_and_count, shards=1, schedule=schedule)
    trainer.fit(data(), batch_size=BATCH, epochs=3, validate=data(16))
    assert optimizer.param_groups[0]["lr"] == pytest.approx(rate)
    assert trainer.run.fixed["schedule"] == "ReduceLROnPlateau every epoch, of count"


def test_what_a_plateau_looks_at_must_be_there():
    model = torch.nn.Linear(6, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    plateau = lr_scheduler.ReduceLROnPlateau(optimizer, "max")
    schedule = unisono.Schedule(plateau, monitor="accuracy")
    trainer = unisono.Trainer(model, optimizer, loss, shards=1, schedule=schedule)
    with pytest.raises(ValueError, match=r"`monitor` must be one of .*\['loss'\]"):
        trainer.fit(data(), batch_size=BATCH, epochs=1, validate=data(16))


def wrong_schedules():
    optimizer = torch.optim.SGD(torch.nn.Linear(1, 1).parameters(), lr=0.1)
    plateau = lr_scheduler.ReduceLROnPlateau(optimizer)
    constant = lr_scheduler.ConstantLR(optimizer)
    grows = lr_scheduler.ReduceLROnPlateau(optimizer, "max")
    return [
        ({"scheduler": 3}, TypeError, "must be one of torch.optim.lr_scheduler"),
        ({"scheduler": plateau, "every": "step"}, ValueError, "Plateau steps after each"),
        ({"scheduler": grows}, ValueError, "but monitors the loss: pass `Schedule"),
        ({"scheduler": constant, "monitor": "accuracy"}, ValueError, "without one: leave it out"),
        ({"scheduler": constant, "every": "hour"}, ValueError, "`every` must be one of"),
    ]


@pytest.mark.parametrize(("given", "kind", "words"), wrong_schedules())
def test_wrong_schedules_are_refused(given, kind, words):
    with pytest.raises(kind, match=words):
        unisono.Schedule(**given)


def test_a_schedule_of_another_optimizer_is_refused():
    model = torch.nn.Linear(1, 1)
    optimizer, other = (torch.optim.SGD(model.parameters(), lr=0.1) for _ in range(2))
    with pytest.raises(ValueError, match="belongs to another one"):
        unisono.Trainer(model, optimizer, loss, schedule=lr_scheduler.ConstantLR(other))


@pytest.mark.parametrize(
    ("every", "steps", "expected"),
    [("1 epoch", 9, [4, 8, 9]), (3, 9, [3, 6, 9]), ("2 epochs", 8, [8]), ("5 steps", 4, [4])],
)
def test_validation_comes_as_often_as_it_is_asked_for(every, steps, expected, capsys):
    seen = []

    class Notes(unisono.callbacks.Callback):
        def on_validation(self, fit, means, seconds):
            seen.append(fit.step)

    trainer = make("lambda", 1, callbacks=[Notes()])
    trainer.fit(data(), batch_size=BATCH, steps=steps, validate=data(23), validate_every=every)
    assert seen == expected


@pytest.mark.parametrize("every", ["10min", 0, "often"])
def test_wrong_intervals_of_validation_are_refused(every):
    with pytest.raises(ValueError, match="`validate_every` must be"):
        make("lambda", 1).fit(
            data(), batch_size=BATCH, steps=1, validate=data(23), validate_every=every
        )


def of(make_schedule, *, every="epoch", lr=0.05, steps=None, epochs=3):
    """Fit over 12 steps of 3 epochs, or fewer; gives the trainer."""
    model = torch.nn.Linear(6, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    trainer = unisono.Trainer(
        *(model, optimizer, loss),
        shards=1,
        schedule=unisono.Schedule(make_schedule(optimizer), every=every),
    )
    trainer.fit(data(), batch_size=BATCH, steps=steps, epochs=epochs, validate=data(9))
    return trainer


STEPWISE = {
    "the learning rate is 0 for the whole first epoch": [
        lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda n: min(1, n / 5)),
    ],
    "it lasts 12 steps, as the run does": [
        lambda optimizer: lr_scheduler.OneCycleLR(optimizer, 0.1, 12),
        lambda optimizer: lr_scheduler.CosineAnnealingLR(optimizer, 12),
        lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda n: (12 - n) / 12),
    ],
    "it lasts 13 steps, of which it would do 3": [
        lambda optimizer: lr_scheduler.OneCycleLR(optimizer, 0.1, 13),
    ],
    "it is made to step after each batch": [
        lambda optimizer: lr_scheduler.CyclicLR(optimizer, 0.01, 0.1)
    ],
}


@pytest.mark.parametrize("why", STEPWISE)
def test_a_schedule_that_seems_to_count_steps_gets_one_line(why, capsys):
    for make_schedule in STEPWISE[why]:
        for every in ("epoch", "step"):
            of(make_schedule, every=every)
            said = capsys.readouterr().out
            assert (f"is stepped once an epoch, but {why}: if it counts steps" in said) == (
                every == "epoch"
            )


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_schedule_that_counts_what_it_is_stepped_by_gets_none(name, capsys):
    make_schedule, every = SCHEDULES[name]
    of(make_schedule, every=every, steps=2, epochs=None)  # no epoch ends
    if every == "epoch" and name != "plateau":
        of(make_schedule, every=every)
    assert "if it counts steps" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("make_schedule", "every", "words"),
    [
        (lambda o: lr_scheduler.OneCycleLR(o, 0.1, 11), "step", "after 11 of 12 steps"),
        (lambda o: lr_scheduler.OneCycleLR(o, 0.1, 2), "epoch", "after 2 of 3 epochs"),
    ],
)
def test_a_schedule_that_is_too_short_is_refused_before_the_first_step(
    make_schedule, every, words, capsys
):
    with pytest.raises(ValueError, match=f"OneCycleLR must last as long as the run, but .*{words}"):
        of(make_schedule, every=every)
    of(make_schedule, every=every, steps=11 if every == "step" else 8)


def test_a_schedule_may_be_shorter_than_epochs_like_the_first():
    class Batches:
        """Cuts epochs of 4, 2 and 2 batches."""

        epoch = 0

        def set_epoch(self, epoch):
            self.epoch = epoch

        def __len__(self):
            return 2 if self.epoch else 4

        def __iter__(self):
            size = 8 // len(self)
            return iter([list(range(at, at + size)) for at in range(0, 8, size)])

    model = torch.nn.Linear(6, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    schedule = unisono.Schedule(lr_scheduler.OneCycleLR(optimizer, 0.1, 8), every="step")
    trainer = unisono.Trainer(model, optimizer, loss, shards=1, schedule=schedule)
    trainer.fit(data(8), batch_sampler=Batches(), epochs=3)
    assert trainer.run.position.step == schedule.scheduler.last_epoch == 8
