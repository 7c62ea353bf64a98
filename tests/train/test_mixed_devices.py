"""Devices that compute other bits than each other: told in one line, and divided by speed."""

from collections import defaultdict

import pytest
import torch
from tests.accelerator import sim
from tests.replacements import wait_for_replacement
from torch import nn

import unisono
from unisono.engine.step import records as phase_timers
from unisono.training import identity as device_fingerprint
from unisono.training.computing import tf32_in_words
from unisono.training.mixed_devices import SPEEDS, kinds_of, read_kinds, speeds_of, told

A, B = "cuda NVIDIA A100, capability 8.0, 108", "cuda NVIDIA H100, capability 9.0, 132"


@pytest.mark.parametrize(
    ("timed", "speeds"),
    [
        ([{0: 0.5, 1: 0.25}], {"0": 2, "1": 4, "2": 4}),
        # devices of one kind are equally fast, whatever was measured
        ([{0: 0.5, 1: 0.2, 2: 0.3}] * 3, {"0": 2, "1": 4, "2": 4}),
        # one slow step does not count
        ([{0: 0.5, 1: 0.25}, {0: 8.0, 1: 0.25}, {0: 0.5, 1: 0.25}], {"0": 2, "1": 4, "2": 4}),
        # nobody of a kind was timed
        ([{1: 0.5}], {"0": 2, "1": 2, "2": 2}),
        ([{0: 0.0, 1: 0.5}], {"0": 1e9, "1": 2, "2": 2}),
    ],
)
def test_speeds_are_those_of_a_kind(timed, speeds):
    assert speeds_of(timed, {0: "a", 1: "b", 2: "b"}) == pytest.approx(speeds)


@pytest.mark.parametrize(
    ("heard", "kinds"),
    [
        ({0: (A, "a"), 1: (A, "a")}, {}),
        ({0: (A, "a"), 1: (B, "b")}, {0: "a", 1: "b"}),
        # of one model, but they compute other bits
        ({0: (A, "a"), 1: (A, "b")}, {0: "a", 1: "b"}),
        # of two models that compute the same
        ({0: (A, "a"), 1: (B, "a")}, {}),
        # one had no memory to find it out
        ({0: (A, "a"), 1: (A, "")}, {}),
        ({0: (A, "a"), 1: (B, "")}, {0: A, 1: B}),
    ],
)
def test_devices_of_a_kind_are_those_with_equal_fingerprints(heard, kinds):
    assert kinds_of(heard) == kinds


@pytest.mark.parametrize(
    ("kinds", "facts", "who"),
    [
        (
            {0: "a", 1: "b"},
            {0: A, 1: B},
            "cuda NVIDIA A100 on rank 0 and cuda NVIDIA H100 on rank 1",
        ),
        (
            {0: "a", 1: "b", 2: "a"},
            {0: A, 1: B, 2: A},
            "cuda NVIDIA A100 on ranks 0, 2 and cuda NVIDIA H100 on rank 1",
        ),
        (
            {0: "a", 1: "b"},
            {0: A, 1: A},
            "cuda NVIDIA A100 (a) on rank 0 and cuda NVIDIA A100 (b) on rank 1",
        ),
    ],
)
def test_devices_are_named(kinds, facts, who):
    assert told(kinds, facts).startswith(f"the workers' devices round differently ({who}): ")


def test_a_replacement_reads_what_the_others_found():
    assert read_kinds(b"") == {}
    assert read_kinds(b'{"0": "a", "1": "b"}') == {0: "a", 1: "b"}


def train(slow, folder, steps=24, mixed=True, rounds=False):
    """Train as one of several workers; say how many shards it computed in each step.

    Time passes on this worker's own clock, as its device is fast or slow.
    """
    sim.install()
    now_s = [0.0]
    phase_timers.perf_counter = lambda: now_s[0]
    rank = unisono.world().rank
    device_fingerprint._known()[f"sim:{rank} {tf32_in_words()}"] = f"{rank if mixed else 0:016}"
    torch.manual_seed(1)
    model = nn.Linear(3, 1)
    run = unisono.Run(
        model, torch.optim.SGD(model.parameters(), lr=0.1), shards=8, device="sim", seed=2
    )
    for step in run.steps(torch.arange(192.0).view(64, 3) / 192, batch_size=16, steps=steps):
        num_shards = 0
        with step:
            for batch in step.shards:
                now_s[0] += 0.02 if rank == slow else 0.002
                step.backward(model(batch).square().mean())
                num_shards += 1
        if step.is_done:
            wait_for_replacement(run._context.team)
            if rounds:  # otherwise than the others, in its update
                model.bias.data.add_(rank * 1e-6)
            with open(f"{folder}/{rank}", "a") as file:
                print(step.number, num_shards, file=file)
    return [p.tolist() for p in model.parameters()], run.last.get(SPEEDS)


def shards_by_step(folder):
    """Read what every worker has noted: by step and rank, its shards when the step was done."""
    found = defaultdict(dict)
    for path in folder.iterdir():
        for line in path.read_text().splitlines():
            step, num_shards = map(int, line.split())
            found[step][int(path.name)] = num_shards
    return found


@pytest.fixture
def simulated():
    if reason := sim.why_not():
        pytest.skip(reason)


@pytest.mark.slow
@pytest.mark.usefixtures("simulated")
@pytest.mark.parametrize("slow", [0, 1])
def test_a_slow_device_gets_fewer_shards_after_some_steps(slow, tmp_path, capfd):
    (weights, speeds), *others = unisono.launch(train, slow, tmp_path, workers=2)
    assert others == [(weights, speeds)]
    assert speeds[str(1 - slow)] > 2 * speeds[str(slow)]
    steps = shards_by_step(tmp_path)
    assert len(steps) == 24
    assert all(sum(shards.values()) == 8 for shards in steps.values())
    assert all(shards == {0: 4, 1: 4} for step, shards in steps.items() if step < 9)
    (last,) = {steps[step][slow] for step in range(14, 24)}
    assert last < 4
    said = capfd.readouterr()
    assert (said.out + said.err).count("the workers' devices round differently") == 1


@pytest.mark.slow
@pytest.mark.usefixtures("simulated")
def test_equal_devices_are_divided_evenly_whatever_their_speed(tmp_path, capfd):
    for _, speeds in unisono.launch(train, 1, tmp_path, 24, False, workers=2):
        assert speeds is None
    assert all(shards == {0: 4, 1: 4} for shards in shards_by_step(tmp_path).values())
    said = capfd.readouterr()
    assert "round differently" not in said.out + said.err


@pytest.mark.slow
@pytest.mark.usefixtures("simulated")
def test_replicas_that_round_differently_are_not_compared(tmp_path):
    (weights, _), (others, _) = unisono.launch(train, 1, tmp_path, 4, True, True, workers=2)
    assert weights != others
    torch.testing.assert_close(weights[0], others[0], rtol=0, atol=1e-3)


@pytest.mark.slow
@pytest.mark.usefixtures("simulated")
@pytest.mark.parametrize("step", [5, 18])
def test_a_replacement_divides_as_the_others_do(step, tmp_path, monkeypatch):
    monkeypatch.setenv("UNISONO_FAULTS", f"kill:rank=1,step={step}")
    told = unisono.launch(train, 1, tmp_path, 60, workers=3)
    assert told == [told[0]] * 3
    by_step = shards_by_step(tmp_path)
    assert len(by_step) == 60
    whole = [n for n, shards in by_step.items() if len(shards) == 3]
    assert all(sum(by_step[n].values()) == 8 for n in whole if n != step)
    assert len(whole) < 60, "nobody was lost"
    assert by_step[59] == by_step[58]
    assert by_step[59][1] < min(by_step[59][0], by_step[59][2])
