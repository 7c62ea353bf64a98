"""One object in several runs: each begins anew, and one that goes on keeps what it knows."""

import inspect

import pytest
import torch
from tests.classified import by_sign as data
from tests.classified import cross_entropy as loss

import unisono
from unisono import callbacks as module
from unisono.callbacks import EMA, BestCheckpoint, Callback, EarlyStopping


def with_state():
    """One of each that is kept with a run."""
    return [EMA(0.9), BestCheckpoint(), EarlyStopping(9)]


def make(directory, callbacks, lr=0.1, loss=loss, **options):
    torch.manual_seed(1)
    model = torch.nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    options = {"shards": 1, "schedule": schedule, "directory": directory, **options}
    return unisono.Trainer(model, optimizer, loss, callbacks=callbacks, **options)


def fit(trainer, epochs=2):
    trainer.fit(data(), batch_size=8, epochs=epochs, validate=data(7))


def known(callbacks):
    return [str(one.state_dict()) for one in callbacks]


def files(directory):
    return {
        path.name: path.read_bytes()
        for path in directory.iterdir()
        if path.suffix == ".safetensors"
    }


def test_all_that_are_kept_with_a_run_are_here():
    public = [getattr(module, name) for name in module.__all__]
    kinds = {one for one in public if inspect.isclass(one) and issubclass(one, Callback)}
    assert {kind for kind in kinds if hasattr(kind, "state_dict")} == set(map(type, with_state()))


@pytest.mark.slow
def test_another_run_begins_anew(tmp_path):
    used = with_state()
    # Both are made before: what counts is when `fit` begins.
    first = make(tmp_path / "first", used)
    second = make(tmp_path / "second", used, lr=1e-4)
    fit(first)
    assert all(map(str.__ne__, known(used), known(with_state())))
    fit(second)
    fresh = with_state()
    fit(make(tmp_path / "fresh", fresh, lr=1e-4))
    assert known(used) == known(fresh)
    assert files(tmp_path / "second") == files(tmp_path / "fresh")
    assert {"best.safetensors"} == files(tmp_path / "second").keys()


@pytest.mark.slow
def test_a_run_that_goes_on_keeps_what_it_knows(tmp_path):
    whole, parts, resumed = (with_state() for _ in range(3))
    fit(make(tmp_path / "whole", whole))
    trainer = make(tmp_path / "parts", parts)
    fit(trainer, epochs=1)
    trainer.callbacks.insert(0, EMA(0.5))  # the other one has another name now
    fit(trainer)
    assert known(parts) == known(whole)
    fit(make(tmp_path / "resumed", resumed), epochs=1)
    fit(make(tmp_path / "other", resumed), epochs=1)
    fit(make(tmp_path / "resumed", resumed))
    assert known(resumed) == known(whole)
    assert files(tmp_path / "resumed") == files(tmp_path / "whole")


@pytest.mark.slow
def test_one_that_comes_to_a_run_under_way_brings_nothing_along(tmp_path):
    used, fresh = EMA(0.9), EMA(0.9)
    fit(make(tmp_path / "other", [used], lr=1.0))
    for name, ema in (("one", used), ("two", fresh)):
        trainer = make(tmp_path / name, [])
        fit(trainer, epochs=1)
        trainer.callbacks.append(ema)
        fit(trainer)
    assert known([used]) == known([fresh])
    # Nor to one whose checkpoint knows nothing of it.
    fit(make(tmp_path / "third", []), epochs=1)
    fit(make(tmp_path / "third", [used]))
    assert known([used]) == known([fresh])
