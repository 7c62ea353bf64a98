"""One digest per model, on however many devices each worker computes, or has split the model."""

import functools
import itertools

import pytest
from tests.chaos.exchanges import ACCELERATED, has_accelerator, install, skip_without
from tests.parity import cases

import unisono

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
UNEVEN = ("cnn with norm and dropout", "adam", 13)  # in an epoch's last batch some have no samples
WAYS = ["devices", "split"]
TWO, THREE = ["sim:0", "sim:1"], ["sim:3", "sim:0", "sim:2"]
LONG = pytest.mark.long
STEPS = 8  # an epoch and the first batch of the next


@functools.cache
def on_one(case, steps=STEPS):
    return cases.train(*case, steps)


def where(way, devices):
    """Give a trainer's options for these devices; a model on one of them is not split."""
    is_whole = way == "split" and len(devices) == 1
    return {"device": devices[0]} if is_whole else {way: devices}


def train_all(way, wanted, device, count):
    install(device)
    return [cases.train(*case, STEPS, **where(way, [device] * count)) for case in wanted]


def check(way, wanted, device, count, workers):
    if device != "cpu":
        skip_without(ACCELERATED)
    for digests in unisono.launch(train_all, way, wanted, device, count, workers=workers):
        assert dict(zip(wanted, digests, strict=True)) == {case: on_one(case) for case in wanted}


@pytest.mark.parametrize("way", WAYS)
def test_two_cpus_in_this_process_have_the_bits_of_one(way):
    assert cases.train(*CASES[0], STEPS, **where(way, ["cpu", "cpu"])) == on_one(CASES[0])


@pytest.mark.parametrize(
    ("way", "devices"),
    [
        *((way, names) for way in WAYS for names in (TWO, THREE)),
        ("devices", ["sim"] * 4),
    ],
)
def test_devices_in_one_process_have_the_bits_of_one_cpu(accelerator, way, devices):
    assert cases.train(*CASES[0], STEPS, **where(way, devices)) == on_one(CASES[0])


@pytest.mark.parametrize("way", ["devices", pytest.param("split", marks=pytest.mark.slow)])
def test_two_workers_with_two_devices_each_have_the_bits_of_one_cpu(way):
    check(way, CASES[:1], "sim", 2, 2)


EVERY = [
    (way, device, count, workers)
    for way, device, count, workers in itertools.product(WAYS, ("cpu", "sim"), (1, 2, 3), (1, 2))
    if (way, count) != ("split", 1) and (device == "cpu" or count * workers <= 4)
]
# Each way with each number of each, and with two workers; the others are `long`.
SOME = [
    *(("devices", "cpu", 3, 1), ("devices", "sim", 1, 2), ("devices", "sim", 2, 2)),
    *(("split", "cpu", 3, 1), ("split", "sim", 2, 2)),
]


@pytest.mark.parametrize(
    ("way", "device", "count", "workers"),
    [pytest.param(*row, marks=(LONG, pytest.mark.slow)[row in SOME]) for row in EVERY],
)
def test_devices_times_workers_have_one_digest(way, device, count, workers):
    check(way, CASES, device, count, workers)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("way", "device", "count", "workers"),
    [
        ("devices", "cpu", 2, 1),
        pytest.param("devices", "sim", 2, 1, marks=LONG),
        ("devices", "sim", 4, 1),
        ("split", "cpu", 2, 1),
        ("split", "sim", 2, 2),
        pytest.param("split", "sim", 2, 1, marks=LONG),
    ],
)
def test_all_kinds_of_models_and_optimizers_are_the_same(way, device, count, workers):
    wanted = OTHER_CASES if way == "split" else [*OTHER_CASES, UNEVEN]
    check(way, wanted, device, count, workers)


def train_until(steps, directory, case, way, devices):
    install(devices[0])
    return cases.train(*case, steps, directory=directory, **where(way, devices))


# Devices of each worker, workers, and where one of them is killed.
LEGS = [
    (["cpu"], 1, ""),
    (["sim"] * 2, 2, "kill:rank=1,step=4,at=shard"),
    (["sim"] * 3, 1, ""),
    (["cpu"] * 3, 2, "kill:rank=0,step=10,at=updated"),
    (["sim"], 2, "kill:rank=0,step=13,at=gradients"),
    (["sim:1", "sim:3"], 2, "kill:rank=0,step=16,at=gradients"),
    (["cpu"] * 2, 2, "kill:rank=1,step=19,at=gradients"),
]
OF_SPLIT = {5: (["sim"] * 2, 2, "kill:rank=0,step=16,at=sums")}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("way", "case"),
    [
        *(("devices", CASES[0]), ("devices", CASES[2]), ("split", CASES[1])),
        pytest.param("devices", CASES[1], marks=LONG),
        *(pytest.param("split", case, marks=LONG) for case in (CASES[0], CASES[2])),
    ],
)
def test_a_run_goes_on_with_other_devices_and_kills_in_between(
    monkeypatch, tmp_path, capfd, way, case
):
    for number, leg in enumerate(LEGS):
        devices, workers, fault = OF_SPLIT.get(number, leg) if way == "split" else leg
        if devices[0] != "cpu" and not has_accelerator():
            continue
        monkeypatch.setenv("UNISONO_FAULTS", fault)
        steps = 3 * number + 3
        told = (steps, str(tmp_path), case, way, devices)
        found = unisono.launch(train_until, *told, workers=workers)
        said = capfd.readouterr().err
        assert found == [on_one(case, steps)] * workers, f"leg {number}: {said}"
        assert ("was killed by SIGKILL" in said) == bool(fault), said
