"""One digest per model, on however many devices each worker computes."""

import functools

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
    ("cnn with norm and dropout", "adam", 13),  # in an epoch's last batch some have no samples
]
STEPS = 8  # an epoch and the first batch of the next


@functools.cache
def on_one(case, steps=STEPS):
    return cases.train(*case, steps)


def train_all(wanted, device, count):
    install(device)
    return [cases.train(*case, STEPS, devices=[device] * count) for case in wanted]


def check(wanted, device, count, workers):
    if device != "cpu":
        skip_without(ACCELERATED)
    for digests in unisono.launch(train_all, wanted, device, count, workers=workers):
        assert dict(zip(wanted, digests, strict=True)) == {case: on_one(case) for case in wanted}


def test_two_cpus_in_this_process_have_the_bits_of_one():
    assert cases.train(*CASES[0], STEPS, devices=["cpu", "cpu"]) == on_one(CASES[0])


@pytest.mark.parametrize("devices", [["sim:0", "sim:1"], ["sim:3", "sim:0", "sim:2"], ["sim"] * 4])
def test_devices_in_one_process_have_the_bits_of_one_cpu(accelerator, devices):
    assert cases.train(*CASES[0], STEPS, devices=devices) == on_one(CASES[0])


def test_two_workers_with_two_devices_each_have_the_bits_of_one_cpu():
    check(CASES[:1], "sim", 2, 2)


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("device", ["cpu", "sim"])
def test_devices_times_workers_have_one_digest(device, count, workers):
    if device == "sim" and count * workers > 4:
        pytest.skip("the test accelerator has four devices")
    check(CASES, device, count, workers)


@pytest.mark.slow
@pytest.mark.parametrize(("device", "count"), [("cpu", 2), ("sim", 2), ("sim", 4)])
def test_all_kinds_of_models_and_optimizers_are_the_same_on_several_devices(device, count):
    check(OTHER_CASES, device, count, 1)


def train_until(steps, directory, case, devices):
    install(devices[0])
    return cases.train(*case, steps, devices=devices, directory=directory)


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


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
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
