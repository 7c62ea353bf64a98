"""Programs whose workers each keep pieces of the optimizer's state: what they see, and its bits."""

import copy

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam
from torch.utils.data import TensorDataset

import unisono
from unisono.engine.state.contents import digest_of

pytestmark = pytest.mark.slow
STEPS, LEFT_AFTER = 7, 3


def data():
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(96, 60, generator=generator)
    return TensorDataset(inputs, inputs[:, :5].argmax(1))


def made():
    torch.manual_seed(2)
    model = nn.Sequential(nn.Linear(60, 70), nn.ReLU(), nn.Linear(70, 5))
    return model, Adam(model.parameters(), lr=0.01)


def steps_of(run, num_steps):
    for step in run.steps(data(), batch_size=12, steps=num_steps):
        with step:
            for inputs, labels in step.shards:
                step.backward(nn.functional.cross_entropy(run.model(inputs), labels))
        yield step


def doubled_and_seen(step, gradients):
    for gradient in gradients.values():
        gradient.mul_(1 + 1 / (1 + gradient.norm()))


def with_everything_between():
    model, optimizer = made()
    run = unisono.Run(
        *(model, optimizer),
        shards=4,
        clip_norm=0.5,
        on_gradients=doubled_and_seen,
        scaler=torch.amp.GradScaler("cpu", init_scale=2.0**126, growth_interval=2),
    )
    norms = [step.gradient_norm for step in steps_of(run, STEPS)]
    return digest_of(model, optimizer), [*map(str, norms)]


def left_early():
    model, optimizer = made()
    run = unisono.Run(model, optimizer, shards=4)
    for step in steps_of(run, STEPS):
        if step.number == LEFT_AFTER:
            break
    run.model.zero_grad()
    del step
    digests = [digest_of(model, optimizer)]  # on whichever worker comes first
    with torch.no_grad():
        optimizer.state[model[0].weight]["exp_avg"].mul_(2)
    for _ in steps_of(run, STEPS):
        pass
    return [*digests, digest_of(model, optimizer)]


def alternating():
    torch.manual_seed(3)
    models = {"g": nn.Linear(60, 60), "d": nn.Linear(60, 5)}
    optimizers = {
        "g": Adam(models["g"].parameters(), lr=0.01),
        "d": SGD(models["d"].parameters(), lr=0.1, momentum=0.9),
    }
    run = unisono.Run(models, optimizers, shards=4)
    for step in run.steps(data(), batch_size=12, steps=STEPS):
        with step:
            for name in optimizers:
                with step.update(name):
                    for inputs, labels in step.shards:
                        outputs = models["d"](models["g"](inputs))
                        step.backward(nn.functional.cross_entropy(outputs, labels))
    return run.digest()


def momentum_of_one_worker_more():
    model, optimizer = made()
    run = unisono.Run(model, optimizer, shards=4)
    for _ in steps_of(run, 2):
        pass
    with torch.no_grad():  # between loops it is the program's
        for state in optimizer.state.values():
            state["exp_avg_sq"].add_(1e-3)
    for _ in steps_of(run, STEPS):
        pass
    return run.digest()


PROGRAMS = (with_everything_between, left_early, alternating, momentum_of_one_worker_more)


def run_all(programs):
    return [program() for program in programs]


@pytest.fixture(scope="module")
def expected():
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("UNISONO_EXCHANGE", "shared")
        programs = [program for program in PROGRAMS if program is not with_everything_between]
        found = {program: program() for program in programs}
        patch.setenv("UNISONO_EXCHANGE", "staged")
        return {**found, with_everything_between: with_everything_between()}


@pytest.mark.parametrize("restarts", [0, 3])
def test_programs_have_the_bits_of_one_worker(monkeypatch, expected, restarts):
    monkeypatch.setenv("UNISONO_EXCHANGE", "zero")
    found = unisono.launch(run_all, PROGRAMS, workers=3, restarts=restarts)
    assert found == [[expected[program] for program in PROGRAMS]] * 3


WAYS = {
    "reads": lambda optimizer, first: optimizer.state[first]["exp_avg"],
    "reads all": lambda optimizer, first: [*optimizer.state.values()],
    "saves": lambda optimizer, first: optimizer.state_dict(),
    "copies": lambda optimizer, first: copy.deepcopy(optimizer),
    "clears": lambda optimizer, first: optimizer.state.clear(),
    "sets": lambda optimizer, first: optimizer.state.update({first: {}}),
    "replaces": lambda optimizer, first: optimizer.load_state_dict(
        Adam(optimizer.param_groups[0]["params"]).state_dict()
    ),
}


def touched_within(way):
    model, optimizer = made()
    run = unisono.Run(model, optimizer, shards=4)
    for step in steps_of(run, STEPS):
        if step.number == 2:
            assert set(optimizer.state) == set(model.parameters())
            assert model[0].weight in optimizer.state
            WAYS[way](optimizer, model[0].weight)
    return "nothing was said"


@pytest.mark.parametrize("way", WAYS)
def test_state_in_pieces_is_never_seen(monkeypatch, way):
    monkeypatch.setenv("UNISONO_EXCHANGE", "zero")
    with pytest.raises(RuntimeError, match=r"`optimizer.state` must be left alone while a loop is"):
        unisono.launch(touched_within, way, workers=2, restarts=0)
