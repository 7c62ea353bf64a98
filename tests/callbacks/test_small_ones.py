"""Learning rates, throughput and garbage: told once, put back always."""

import gc

import pytest
import torch
from tests.classified import by_sign as data
from tests.classified import cross_entropy as loss

import unisono
from unisono.callbacks import Callback, GarbageCollection, LearningRateMonitor, Throughput
from unisono.callbacks.callback import Times


def train(*callbacks, epochs=3, gamma=0.5, directory=None):
    torch.manual_seed(1)
    model = torch.nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=gamma)
    trainer = unisono.Trainer(
        model,
        optimizer,
        loss,
        shards=1,
        schedule=schedule,
        callbacks=callbacks,
        directory=directory,
    )
    return trainer.fit(data(), batch_size=8, epochs=epochs)


def test_changes_of_the_learning_rate_are_told_and_kept(capsys, tmp_path):
    whole, first, second = (LearningRateMonitor() for _ in range(3))
    train(whole, epochs=5)
    told = [line for line in capsys.readouterr().out.splitlines() if "learning rate" in line]
    assert told == [
        "epoch 2: learning rate 0.1 → 0.05",
        "epoch 4: learning rate 0.05 → 0.025",
    ]
    assert whole.changes == [(0, [0.1]), (6, [0.05]), (12, [0.025])]
    train(first, epochs=3, directory=tmp_path)
    train(second, epochs=5, directory=tmp_path)
    assert second.changes == whole.changes


def test_throughput_says_a_line_an_epoch(capsys):
    train(Throughput(), epochs=2)
    told = [line for line in capsys.readouterr().out.splitlines() if "waiting" in line]
    assert [line.split(":")[0] for line in told] == ["epoch 1", "epoch 2"]
    assert all(line.endswith("MiB") for line in told)


class Fit:
    ranks, is_first, step, epoch = (0, 2), True, 0, 0

    def __init__(self):
        self.said = []

    def pid(self, rank):
        return None

    def times(self, rank, step):
        waited_s = {0: 1.0, 2: 3.0}[rank]
        return None if step == 1 else Times(0.0, 0.0, 4.0 - waited_s, 0.0, waited_s, 0.0, 0.0)

    def say(self, line):
        self.said.append(line)


class Step:
    def __init__(self, number):
        self.number, self.num_samples = number, 50


@pytest.fixture
def fit():
    return Fit()


def steps(fit, throughput, clock, numbers):
    for number in numbers:
        clock[0] += 0.5
        fit.step = number + 1
        throughput.on_step_end(fit, Step(number))


def test_shares_of_waiting_are_each_workers_own(fit):
    clock = [100.0]
    throughput = Throughput(clock=lambda: clock[0])
    throughput.on_begin(fit)
    steps(fit, throughput, clock, range(3))
    clock[0] += 60.0
    throughput.on_validation(fit, {}, 60.0)
    steps(fit, throughput, clock, [3])
    throughput.on_epoch_end(fit)
    assert fit.said == ["epoch 0: 100 samples/s, waiting 25 %, 75 %, memory –, –"]


def test_throughput_by_time(fit):
    clock = [100.0]
    throughput = Throughput(every_s=2.0, clock=lambda: clock[0])
    throughput.on_begin(fit)
    steps(fit, throughput, clock, range(9))
    throughput.on_epoch_end(fit)
    throughput.on_end(fit, None)
    assert [line.split(":")[0] for line in fit.said] == ["step 4", "step 8", "step 9"]


class Looks(Callback):
    def __init__(self, fail_at=None):
        self.seen, self.fail_at = [], fail_at

    def on_step_end(self, fit, step):
        self.seen.append(gc.isenabled())
        if step.number == self.fail_at:
            raise RuntimeError("on purpose")


@pytest.fixture
def collections():
    """Count Python's collections of the oldest generation."""
    seen = []

    def note(phase, info):
        if phase == "start" and info["generation"] == 2:
            seen.append(gc.isenabled())

    gc.unfreeze()  # what our conftest has frozen: programs freeze nothing
    gc.callbacks.append(note)
    yield seen
    gc.callbacks.remove(note)
    gc.freeze()


@pytest.mark.slow
def test_garbage_is_collected_at_the_same_steps_and_never_else(collections):
    looks = Looks()
    gc.collect()
    collections.clear()
    train(GarbageCollection(every=4), looks, epochs=4)
    assert looks.seen == [False] * 12
    ours = [was_enabled for was_enabled in collections if not was_enabled]
    assert len(ours) == 4, "once when it begins, then after steps 3, 7 and 11"
    assert gc.isenabled()
    assert gc.get_freeze_count() == 0


def test_what_was_before_comes_back_after_an_error():
    with pytest.raises(unisono.CallbackError, match="on purpose"):
        train(GarbageCollection(), Looks(fail_at=3))
    assert gc.isenabled()
    gc.disable()
    try:
        train(GarbageCollection(), epochs=1)
        assert not gc.isenabled()
    finally:
        gc.enable()


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: GarbageCollection(0), "`every` must be at least 1"),
        (lambda: Throughput(0.0), "`every_s` must be above 0"),
    ],
)
def test_wrong_options_are_refused(make, words):
    with pytest.raises(ValueError, match=words):
        make()
