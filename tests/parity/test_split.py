"""One digest per model, on however many devices each worker has split the model over."""

import functools
import itertools

import pytest
from tests.chaos.exchanges import ACCELERATED, has_accelerator, install, skip_without
from tests.parity import cases
from tests.promises import promise

import unisono

pytestmark = pytest.mark.slow

CASES = [
    ("cnn with norm and dropout", "fused adam", 6),
    ("gpt", "two groups", 6),
    ("cnn with norm and dropout", "own", 6),  # looks at whole parameters
]
OTHER_CASES = [
    ("mixed", "adamw", 5),
    ("sometimes unused", "sgd with momentum", 8),
    ("lstm with bag", "adam", 5),
    ("tied", "adamw", 5),
    ("matrices", "muon", 7),
    ("cnn with norm", "adafactor", 7),
]
LONG = pytest.mark.long
STEPS = 8  # an epoch and the first batch of the next


@functools.cache
def on_one(case, steps=STEPS):
    return cases.train(*case, steps)


def where(devices):
    """Give a trainer's options for these devices; a model on one of them is not split."""
    return {"device": devices[0]} if len(devices) == 1 else {"split": devices}


def train_all(wanted, device, count):
    install(device)
    return [cases.train(*case, STEPS, **where([device] * count)) for case in wanted]


def check(wanted, device, count, workers):
    if device != "cpu":
        skip_without(ACCELERATED)
    for digests in unisono.launch(train_all, wanted, device, count, workers=workers):
        assert dict(zip(wanted, digests, strict=True)) == {case: on_one(case) for case in wanted}


@promise("one-result.1")
def test_two_cpus_in_this_process_have_the_bits_of_one():
    assert cases.train(*CASES[0], STEPS, split=["cpu", "cpu"]) == on_one(CASES[0])


@pytest.mark.parametrize("devices", [["sim:0", "sim:1"], ["sim:3", "sim:0", "sim:2"]])
def test_devices_in_one_process_have_the_bits_of_one_cpu(accelerator, devices):
    assert cases.train(*CASES[0], STEPS, split=devices) == on_one(CASES[0])


@pytest.mark.parametrize(
    ("device", "count", "workers"),
    [
        *[("cpu", 3, 1), ("sim", 2, 2)],
        *(
            pytest.param(*row, marks=LONG)
            for row in itertools.product(("cpu", "sim"), (2, 3), (1, 2))
            if row not in [("cpu", 3, 1), ("sim", 2, 2), ("sim", 3, 2)]
        ),
    ],
)
def test_devices_times_workers_have_one_digest(device, count, workers):
    check(CASES, device, count, workers)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("device", "count", "workers"),
    [("cpu", 2, 1), ("sim", 2, 2), pytest.param("sim", 2, 1, marks=LONG)],
)
def test_all_kinds_of_models_and_optimizers_are_the_same(device, count, workers):
    check(OTHER_CASES, device, count, workers)


def train_until(steps, directory, case, devices):
    install(devices[0])
    return cases.train(*case, steps, directory=directory, **where(devices))


# Devices of each worker, workers, and where one of them is killed.
LEGS = [
    (["cpu"], 1, ""),
    (["sim"] * 2, 2, "kill:rank=1,step=4,at=shard"),
    (["sim"] * 3, 1, ""),
    (["cpu"] * 3, 2, "kill:rank=0,step=10,at=updated"),
    (["sim"], 2, "kill:rank=0,step=13,at=gradients"),
    (["sim"] * 2, 2, "kill:rank=0,step=16,at=sums"),
    (["cpu"] * 2, 2, "kill:rank=1,step=19,at=gradients"),
]


@pytest.mark.slow
@pytest.mark.parametrize(
    "case", [CASES[1], *(pytest.param(case, marks=LONG) for case in (CASES[0], CASES[2]))]
)
def test_a_run_goes_on_with_other_devices_and_kills_in_between(monkeypatch, tmp_path, capfd, case):
    for number, (devices, workers, fault) in enumerate(LEGS):
        if devices[0] != "cpu" and not has_accelerator():
            continue
        monkeypatch.setenv("UNISONO_FAULTS", fault)
        steps = 3 * number + 3
        told = (steps, str(tmp_path), case, devices)
        found = unisono.launch(train_until, *told, workers=workers)
        said = capfd.readouterr().err
        assert found == [on_one(case, steps)] * workers, f"leg {number}: {said}"
        assert ("was killed by SIGKILL" in said) == bool(fault), said
