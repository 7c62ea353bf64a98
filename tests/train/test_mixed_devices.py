"""Devices that compute other bits than each other: refused, or told in one line."""

import pytest
import torch
from tests.accelerator import sim
from torch import nn

import unisono
from unisono.errors import MismatchError
from unisono.training import identity
from unisono.training.computing import tf32_in_words
from unisono.training.identity import kinds_of

A, B = "cuda NVIDIA A100, capability 8.0, 108", "cuda NVIDIA H100, capability 9.0, 132"


@pytest.mark.parametrize(
    ("heard", "kinds"),
    [
        ({0: (A, "a"), 1: (A, "a")}, {0: "a", 1: "a"}),
        # of one model, but they compute other bits
        ({0: (A, "a"), 1: (A, "b")}, {0: "a", 1: "b"}),
        # of two models that compute the same
        ({0: (A, "a"), 1: (B, "a")}, {0: "a", 1: "a"}),
        # one had no memory to find it out
        ({0: (A, "a"), 1: (A, "")}, {0: A, 1: A}),
        ({0: (A, "a"), 1: (B, "")}, {0: A, 1: B}),
    ],
)
def test_devices_of_a_kind_are_those_with_equal_fingerprints(heard, kinds):
    assert kinds_of(heard) == kinds


def train(mixed, exact):
    """Train as one of several workers, whose updates differ as mixed devices' do."""
    sim.install()
    rank = unisono.world().rank
    identity._known()[f"sim:{rank} as usual {tf32_in_words()}"] = f"{rank if mixed else 0:016}"
    torch.manual_seed(1)
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run = unisono.Run(model, optimizer, shards=8, device="sim", seed=2, exact=exact)
    for step in run.steps(torch.arange(192.0).view(64, 3) / 192, batch_size=16, steps=4):
        with step:
            for batch in step.shards:
                step.backward(model(batch).square().mean())
        if step.is_done and mixed:
            model.bias.data.add_(rank * 1e-6)
    return [p.tolist() for p in model.parameters()]


@pytest.fixture
def simulated():
    if reason := sim.why_not():
        pytest.skip(reason)


@pytest.mark.slow
@pytest.mark.usefixtures("simulated")
def test_devices_that_round_differently_are_refused():
    with pytest.raises(MismatchError, match=r"on rank 0 and .* on rank 1\): use .*exact=False"):
        unisono.launch(train, True, True, workers=2)


@pytest.mark.slow
@pytest.mark.usefixtures("simulated")
def test_replicas_that_round_differently_are_not_compared(capfd):
    weights, others = unisono.launch(train, True, False, workers=2)
    assert weights != others
    torch.testing.assert_close(weights[0], others[0], rtol=0, atol=1e-3)
    said = capfd.readouterr()
    assert (said.out + said.err).count("the workers' devices round differently") == 1


@pytest.mark.slow
@pytest.mark.usefixtures("simulated")
def test_nothing_is_said_of_devices_that_compute_the_same_bits(capfd):
    weights, others = unisono.launch(train, False, True, workers=2)
    assert weights == others
    said = capfd.readouterr()
    assert "round differently" not in said.out + said.err
