"""Programs as users write them have the CPU's bits on an accelerator, or are refused in words."""

import functools
import gc
import json

import pytest
import torch
from tests.chaos.exchanges import ACCELERATED, device_of, skip_without, variables_of
from tests.classified import taken
from tests.device import unusual
from torch import nn

import unisono


def as_json(found):
    """What a program has found, with its bits."""
    return json.loads(json.dumps(found, default=repr))


def found_by(name, device):
    (found,) = unusual.run_all([name], device)
    return as_json(found)


@pytest.mark.slow
def test_programs_have_the_bits_of_the_cpu(accelerator):
    for name in unusual.PROGRAMS:
        expected = found_by(name, "cpu")
        assert "Error: " not in str(expected)[:60], name
        assert found_by(name, "sim") == expected, name


@functools.cache
def found_alone(every):
    names = list(unusual.PROGRAMS)[::every]
    (alone,) = unisono.launch(unusual.run_all, names, "cpu", workers=1, restarts=0)
    return names, alone


@pytest.mark.slow
@pytest.mark.parametrize(
    ("exchange", "workers", "every"),
    [
        (ACCELERATED, 3, 3),  # each third program
        *(
            pytest.param(exchange, workers, 1, marks=pytest.mark.long)
            for exchange in (ACCELERATED, "staged", "shared")
            for workers in (2, 3)
        ),
    ],
)
def test_programs_have_the_bits_of_one_worker(monkeypatch, exchange, workers, every):
    skip_without(exchange)
    names, alone = found_alone(every)
    for variable, value in variables_of(exchange).items():
        monkeypatch.setenv(variable, value)
    told = (names, device_of(exchange))
    for found in unisono.launch(unusual.run_all, *told, workers=workers, restarts=0):
        for name, one, expected in zip(names, found, alone, strict=True):
            assert as_json(one) == as_json(expected), name


# What cannot be done is said


def trainer_of(model, device="sim", **options):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return unisono.Trainer(model, optimizer, unusual.loss_of, shards=4, device=device, **options)


def test_a_model_that_is_elsewhere_or_over_two_devices_is_refused(accelerator):
    buffer = unusual.net()
    buffer[1].running_mean = buffer[1].running_mean.to("sim:3")
    two = nn.Sequential(nn.Linear(8, 8).to("sim:0"), nn.Linear(8, 4).to("sim:1"))
    for model, device, words in (
        (unusual.net().to("sim:2"), "sim", r"on .*sim:0, but parameter `0\.weight` is on sim:2"),
        (unusual.net().to("sim"), "cpu", r"on the CPU, but .* is on sim:0"),
        (two, "sim", r"parameter `1\.weight` is on sim:1"),
        (buffer, "sim", r"buffer `1\.running_mean` is on sim:3"),
    ):
        with pytest.raises(ValueError, match=words):
            trainer_of(model, device)


MOVES = {
    "the model to the CPU": lambda model: model.cpu(),
    "the model to another device": lambda model: model.to("sim:1"),
    "the model to another dtype": lambda model: model.double(),
}


@pytest.mark.parametrize("move", MOVES.values(), ids=list(MOVES))
def test_a_model_that_is_moved_in_a_loop_is_refused(accelerator, move):
    model = unusual.net()
    run = unisono.Run(model, torch.optim.SGD(model.parameters(), lr=0.1), shards=4, device="sim")
    with pytest.raises(RuntimeError, match=r"must keep its|must stay"):
        for _ in taken(run, unusual.loss_of, unusual.data(40), **unusual.FIT):
            move(model)


@pytest.mark.slow
@pytest.mark.parametrize(
    "move",
    [
        lambda model: model[0].to("sim:1"),
        lambda model: setattr(model[0].weight, "data", model[0].weight.data.clone()),
    ],
    ids=["a layer", "data"],
)
def test_parameters_that_are_moved_between_steps_are_moved_back(accelerator, move):
    trainer = unusual.make("sim")
    for _ in taken(trainer.run, unusual.loss_of, unusual.data(40), batch_size=10, steps=3):
        move(trainer.run.model)
    undisturbed = unusual.make("sim")
    for _ in taken(undisturbed.run, unusual.loss_of, unusual.data(40), batch_size=10, steps=3):
        pass
    assert trainer.digest() == undisturbed.digest()


def test_a_buffer_that_moves_in_forward_is_refused(accelerator):
    class Moving(nn.Linear):
        def __init__(self):
            super().__init__(8, 4)
            self.register_buffer("mean", torch.zeros(4))

        def forward(self, inputs):
            outputs = super().forward(inputs)
            self.mean = outputs.detach().mean(0).cpu()
            return outputs

    trainer = trainer_of(Moving())
    with pytest.raises(RuntimeError, match=r"buffer `mean` must stay on sim:0 .* but is on cpu"):
        trainer.fit(unusual.data(40), **unusual.FIT)


@pytest.fixture
def swapping():
    """Have `model.cpu()` keep its parameters, as it does for GPUs."""
    torch.__future__.set_swap_module_params_on_conversion(True)
    yield
    torch.__future__.set_swap_module_params_on_conversion(False)


@pytest.mark.slow
def test_a_model_moved_between_fits_is_moved_back(accelerator, swapping):
    def trained(change):
        trainer = unusual.make("sim")
        trainer.fit(unusual.data(40), batch_size=10, steps=3)
        change(trainer)
        trainer.fit(unusual.data(40), batch_size=10, steps=7)
        return trainer.digest()

    assert trained(lambda trainer: trainer.run.model.cpu()) == trained(lambda trainer: None)


def test_a_model_whose_parameters_are_others_now_is_refused(accelerator):
    trainer = unusual.make("sim")
    trainer.fit(unusual.data(40), batch_size=10, steps=3)
    trainer.run.model.cpu()  # replaces them, where they cannot be converted
    with pytest.raises(ValueError, match="but updates none of them: make it from"):
        trainer.fit(unusual.data(40), batch_size=10, steps=7)


@pytest.mark.slow
def test_layers_and_groups_may_come_between_fits(accelerator):
    def trained(device):
        trainer = unusual.make(device)
        trainer.fit(unusual.data(40), batch_size=10, steps=3)
        model, optimizer = trainer.run.model, trainer.run.optimizer
        model.append(nn.Linear(4, 4))
        optimizer.add_param_group({"params": model[-1].parameters()})
        with torch.no_grad():
            model[-1].weight.fill_(0.1)
            model[-1].bias.fill_(0.1)
        trainer.fit(unusual.data(40), batch_size=10, steps=7)
        return trainer.digest()

    assert trained("sim") == trained("cpu")


@pytest.mark.slow
def test_what_does_not_fit_into_memory_is_named(accelerator):
    trainer = unusual.make("sim")
    accelerator.limit(0, torch.sim.memory_allocated(0) + 3000)
    with pytest.raises(unisono.errors.OutOfMemoryError, match="memory of sim:0 must hold"):
        trainer.fit(unusual.data(40), **unusual.FIT)
    accelerator.limit(0, None)
    trainer.fit(unusual.data(40), **unusual.FIT)


def test_a_model_whose_hooks_would_be_lost_is_moved_first(accelerator):
    model = nn.Linear(8, 4)
    model.weight.register_hook(torch.zeros_like)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ValueError, match=r"moving `weight` to sim:0 would lose its hooks: call"):
        unisono.Run(model, optimizer, device="sim")


@pytest.mark.slow
def test_memory_is_given_back_when_a_loop_ends(accelerator):
    def left():
        gc.disable()
        trainer = unusual.make("sim")
        trainer.fit(unusual.data(40), batch_size=10, steps=2)
        before = torch.sim.memory_allocated(0)
        for steps in (3, 4, 5):
            trainer.fit(unusual.data(40), batch_size=10, steps=steps)
        return torch.sim.memory_allocated(0) - before

    assert left() == 0


@pytest.mark.slow
def test_weights_trained_there_are_loaded_on_the_cpu(accelerator, tmp_path):
    trainer = unusual.make("sim", directory=tmp_path / "a run")
    trainer.fit(unusual.data(40), **unusual.FIT)
    trainer.save(tmp_path / "weights.safetensors")
    expected = {name: value.cpu() for name, value in trainer.run.model.state_dict().items()}
    for source in (tmp_path / "a run", tmp_path / "weights.safetensors"):
        model = unusual.net()
        unisono.load_weights(source, model)
        for name, value in model.state_dict().items():
            assert value.device.type == "cpu"
            assert torch.equal(value, expected[name]), name
