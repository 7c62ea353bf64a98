"""One digest per model, whatever carries the gradients and wherever workers compute."""

import functools

import pytest
from tests.chaos.exchanges import (
    ACCELERATED,
    EXCHANGES,
    device_of,
    has_accelerator,
    install,
    use,
)
from tests.parity import cases
from tests.promises import promise

import unisono
from unisono.engine.exchange.choice import name_of_exchange
from unisono.runtime.device import host

CASES = [
    ("cnn with norm and dropout", "fused adam", 4),
    ("gpt", "two groups", 3),
    ("cnn with norm and dropout", "own", 4),  # looks at whole parameters
]
ON_THREE = [
    *CASES,
    ("mixed", "adamw", 4),
    ("sometimes unused", "sgd with momentum", 8),
    ("matrices", "muon", 3),
]
# Groups of tensors, which torch takes on devices, are rounded otherwise in three of them; Muon
# takes matrices alone.
OTHERWISE = ("nadam", "radam", "asgd", "muon")
OTHER_CASES = [
    ("mixed", "adamw", 4),
    ("sometimes unused", "sgd with momentum", 8),
    ("lstm with bag", "adam", 4),
    ("tied", "adamw", 3),
    ("matrices", "muon", 3),
    *(("cnn with norm", name, 4) for name in cases.OPTIMIZERS if name != "two groups"),
    *(("cnn with norm", name, 4) for name in cases.OTHER_OPTIMIZERS if name not in OTHERWISE),
]
STEPS = 8  # an epoch and the first batch of the next


def train_all(wanted, device):
    install(device)
    return cases.train_all(wanted, STEPS, device)


@functools.cache
def in_shared_memory(wanted):
    """The digests of one worker without a launcher."""
    digests = cases.train_all(wanted, STEPS)
    assert len(set(digests)) >= len([case for case in wanted if "fused sgd" not in case])
    return digests


def check(monkeypatch, exchange, workers, wanted):
    expected = in_shared_memory(tuple(wanted))
    use(monkeypatch, exchange)
    for digests in unisono.launch(train_all, wanted, device_of(exchange), workers=workers):
        assert dict(zip(wanted, digests, strict=True)) == dict(zip(wanted, expected, strict=True))


@promise("one-result.1")
@pytest.mark.slow
@pytest.mark.parametrize(
    ("workers", "wanted"),
    [pytest.param(1, CASES, marks=pytest.mark.long), (2, CASES), (3, ON_THREE)],
    ids=["1", "2", "3"],
)
@pytest.mark.parametrize("exchange", EXCHANGES)
def test_every_exchange_has_one_digest_on_one_two_and_three_workers(
    monkeypatch, exchange, workers, wanted
):
    check(monkeypatch, exchange, workers, wanted)
    if device_of(exchange) != ACCELERATED:
        assert name_of_exchange(host()) == exchange


@pytest.mark.long
def test_state_is_divided_among_four_workers(monkeypatch):
    check(monkeypatch, "zero", 4, [case for case in (*CASES, *OTHER_CASES) if case[2] >= 4])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("exchange", "workers"),
    [pytest.param(ACCELERATED, 1, marks=pytest.mark.long), (ACCELERATED, 3), ("sim-zero", 3)],
)
def test_all_kinds_of_models_and_optimizers_are_the_same_on_the_test_accelerator(
    monkeypatch, exchange, workers
):
    check(monkeypatch, exchange, workers, OTHER_CASES)


@pytest.mark.slow
def test_two_workers_may_share_a_device(monkeypatch):
    monkeypatch.setenv("UNISONO_WORKERS_PER_GPU", "2")
    check(monkeypatch, ACCELERATED, 3, CASES[:1])


# Stopped with one exchange, gone on with with another


# Each worker has, or sees, the whole state; each exchange comes once behind each other one.
WHOLE = ("shared", "staged", "shared", "gloo", "shared", "sim", "staged", "gloo", "staged")
WHOLE += ("sim", "gloo", "sim", "shared")
DIVIDED = ("zero", "shared", "zero", "gloo", "zero", "sim-zero", "sim", "zero")


def train_until(steps, directory, case, device):
    install(device)
    return cases.train(*case, steps, device, directory=directory)


@promise("one-result.1")
@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "names"),
    [
        (CASES[0], WHOLE),
        (CASES[0], DIVIDED),
        *(pytest.param(case, WHOLE, marks=pytest.mark.long) for case in CASES[1:]),
    ],
)
def test_a_run_goes_on_with_every_other_exchange(monkeypatch, tmp_path, case, names):
    assert {*WHOLE, *DIVIDED} == EXCHANGES.keys()
    names = [name for name in names if device_of(name) != ACCELERATED or has_accelerator()]
    for leg, exchange in enumerate(names):
        use(monkeypatch, exchange)
        steps, workers = 2 * leg + 2, leg % 3 + 1
        told = (steps, str(tmp_path), case, device_of(exchange))
        found = unisono.launch(train_until, *told, workers=workers)
        assert found == [undisturbed(case)[leg]] * workers, f"{exchange}, leg {leg}"


@functools.cache
def undisturbed(case):
    return [cases.train(*case, 2 * leg + 2) for leg in range(13)]
