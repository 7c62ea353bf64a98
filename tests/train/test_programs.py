"""Programs of all kinds come to the same on any number of workers, and however often they stop."""

import functools

import pytest
from tests.promises import promise
from tests.train import (
    closures,
    pairs,
    test_gradient_edits,
    test_on_gradients,
    test_per_sample,
    test_precision,
    test_schedule,
    test_token_mean,
    test_whole_batch,
)

import unisono

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore:The epoch parameter in")]
PROGRAMS = {
    **{name: functools.partial(closures.train, name) for name in closures.OPTIMIZERS},
    **{name: functools.partial(pairs.train, name) for name in pairs.PROGRAMS},
    **{
        f"schedule: {name}": functools.partial(test_schedule.train, name)
        for name in test_schedule.SCHEDULES
    },
    **{name: functools.partial(test_precision.train, name) for name in ("bf16", "fp16")},
    **{
        kind: functools.partial(test_gradient_edits.with_hooks, kind)
        for kind in ("register_hook", "register_post_accumulate_grad_hook")
    },
    **{
        f"gradients: {hook}": functools.partial(test_on_gradients.train, hook, optimizer=optimizer)
        for hook, optimizer in (("noisy", "adam"), ("replaced", "adafactor"))
    },
    "whole batch": test_whole_batch.train,
    "per sample": test_per_sample.train,
    "tokens": test_token_mean.train,
}


def train_all(folder=None, steps=None):
    how = {} if steps is None else {"steps": steps}
    return {
        name: train(**how, directory=None if folder is None else folder / name)
        for name, train in PROGRAMS.items()
    }


@pytest.fixture(scope="module")
def alone():
    return train_all()


@pytest.mark.parametrize(("workers", "exchange"), [(2, "gloo"), (3, "auto")])
def test_any_number_of_workers_comes_to_the_same(monkeypatch, alone, workers, exchange):
    monkeypatch.setenv("UNISONO_EXCHANGE", exchange)
    for found in unisono.launch(train_all, workers=workers):
        assert found == alone


@promise("one-result.1")
def test_a_run_goes_on_with_others(tmp_path, alone):
    stopped = unisono.launch(train_all, tmp_path, 3, workers=2)[0]
    assert not any(stopped[name] == alone[name] for name in alone)
    assert train_all(tmp_path) == alone


@pytest.mark.parametrize(
    ("name", "exchange", "faults"),
    [
        ("per sample", "shared", "kill:rank=0,step=2,at=gradients; kill:rank=1,step=3,at=update"),
        ("per sample", "gloo", "kill:rank=0,step=2,at=gradients; kill:rank=1,step=3,at=update"),
        ("sam", "staged", "kill:rank=1,step=2,at=gradients"),
        ("sam", "gloo", "kill:rank=1,step=2,at=sums"),
        ("sam", "staged", "kill:rank=1,step=2,at=update"),
        ("gradients: noisy", "gloo", "kill:rank=1,step=2,at=sums"),
        ("schedule: plateau", "auto", "kill:rank=1,step=5,at=update"),
        ("tokens", "auto", "kill:rank=1,step=2,at=gradients"),
    ],
)
def test_workers_that_are_killed_cost_nothing(monkeypatch, alone, name, exchange, faults):
    monkeypatch.setenv("UNISONO_EXCHANGE", exchange)
    monkeypatch.setenv("UNISONO_FAULTS", faults)
    assert unisono.launch(PROGRAMS[name], workers=3) == [alone[name]] * 3


@pytest.mark.parametrize(
    "name", ["sam", "line search", "ActorCritic", "FrozenTeacher", "whole batch"]
)
def test_the_bits_are_the_same_on_accelerators(accelerator, name):
    assert PROGRAMS[name](device="sim") == PROGRAMS[name](device="cpu")
