"""Batches of a batch sampler have one digest, whatever carries the gradients."""

import functools

import pytest
from tests.chaos.exchanges import EXCHANGES, device_of, install, use
from tests.data import in_batches

import unisono

CASES = ("tokens", "growing", "poisson")


def train_there(device, steps=20, directory=None):
    install(device)
    return [
        in_batches.train(
            kind, steps=steps, device=device, directory=directory and f"{directory}/{kind}"
        )[0]
        for kind in CASES
    ]


@functools.cache
def in_shared_memory(steps=20):
    found = train_there("cpu", steps)
    assert len(set(found)) == len(CASES)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("workers", [pytest.param(2, marks=pytest.mark.long), 3])
@pytest.mark.parametrize("exchange", EXCHANGES)
def test_batches_of_all_sizes_have_one_digest_on_every_exchange(monkeypatch, exchange, workers):
    use(monkeypatch, exchange)
    found = unisono.launch(train_there, device_of(exchange), workers=workers)
    assert found == [in_shared_memory()] * workers


@pytest.mark.slow
def test_a_run_over_batches_goes_on_with_every_other_exchange(monkeypatch, tmp_path):
    for leg, exchange in enumerate(("shared", "staged", "gloo", "zero", "shared")):
        use(monkeypatch, exchange)
        steps, workers = 4 * leg + 4, leg % 3 + 1
        there = functools.partial(train_there, directory=str(tmp_path))
        found = unisono.launch(there, device_of(exchange), steps, workers=workers)
        assert found == [in_shared_memory(steps)] * workers, exchange


def train_patiently_there(device):
    install(device)
    return in_batches.train_patiently("tokens", device=device)


@pytest.mark.long
@pytest.mark.parametrize("exchange", [name for name in EXCHANGES if name != "shared"])
def test_a_kill_costs_no_bit_on_any_exchange(monkeypatch, exchange):
    expected = in_batches.train("tokens")
    use(monkeypatch, exchange)
    monkeypatch.setenv("UNISONO_FAULTS", "kill:rank=1,step=4; kill:rank=0,step=11,at=update")
    found = unisono.launch(train_patiently_there, device_of(exchange), workers=2)
    assert [each[0] for each, _ in found] == [expected[0]] * 2
    assert all(joined is not None and joined < 27 for _, joined in found)
