"""Models that are moved to an accelerator, on it or from it: they are moved back, or refused.

That programs have the CPU's bits there is in the catalogue (`tests.programs`).
"""

import functools
import gc

import pytest
import torch
from tests.classified import at_random, taken
from tests.classified import cross_entropy as loss_of
from torch import nn

import unisono

FIT = {"batch_size": 10, "steps": 7}
data = functools.partial(at_random, 40, 8, 4, seed=3)


def net():
    hidden = nn.BatchNorm1d(16, momentum=0.3), nn.ReLU(), nn.Dropout(0.2)
    return nn.Sequential(nn.Linear(8, 16), *hidden, nn.Linear(16, 4))


def make(device, loss=loss_of, **options):
    torch.manual_seed(0)
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    return unisono.Trainer(model, optimizer, loss, shards=4, device=device, **options)


def trainer_of(model, device="sim", **options):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return unisono.Trainer(model, optimizer, loss_of, shards=4, device=device, **options)


def test_a_model_that_is_elsewhere_or_over_two_devices_is_refused(accelerator):
    buffer = net()
    buffer[1].running_mean = buffer[1].running_mean.to("sim:3")
    two = nn.Sequential(nn.Linear(8, 8).to("sim:0"), nn.Linear(8, 4).to("sim:1"))
    for model, device, words in (
        (net().to("sim:2"), "sim", r"on .*sim:0, but parameter `0\.weight` is on sim:2"),
        (net().to("sim"), "cpu", r"on the CPU, but .* is on sim:0"),
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
    model = net()
    run = unisono.Run(model, torch.optim.SGD(model.parameters(), lr=0.1), shards=4, device="sim")
    with pytest.raises(RuntimeError, match=r"must keep its|must stay"):
        for _ in taken(run, loss_of, data(), **FIT):
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
    trainer = make("sim")
    for _ in taken(trainer.run, loss_of, data(), batch_size=10, steps=3):
        move(trainer.run.model)
    undisturbed = make("sim")
    for _ in taken(undisturbed.run, loss_of, data(), batch_size=10, steps=3):
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
        trainer.fit(data(), **FIT)


@pytest.fixture
def swapping():
    """Have `model.cpu()` keep its parameters, as it does for GPUs."""
    torch.__future__.set_swap_module_params_on_conversion(True)
    yield
    torch.__future__.set_swap_module_params_on_conversion(False)


@pytest.mark.slow
def test_a_model_moved_between_fits_is_moved_back(accelerator, swapping):
    def trained(change):
        trainer = make("sim")
        trainer.fit(data(), batch_size=10, steps=3)
        change(trainer)
        trainer.fit(data(), batch_size=10, steps=7)
        return trainer.digest()

    assert trained(lambda trainer: trainer.run.model.cpu()) == trained(lambda trainer: None)


def test_a_model_whose_parameters_are_others_now_is_refused(accelerator):
    trainer = make("sim")
    trainer.fit(data(), batch_size=10, steps=3)
    trainer.run.model.cpu()  # replaces them, where they cannot be converted
    with pytest.raises(ValueError, match="but updates none of them: make it from"):
        trainer.fit(data(), batch_size=10, steps=7)


@pytest.mark.slow
def test_layers_and_groups_may_come_between_fits(accelerator):
    def trained(device):
        trainer = make(device)
        trainer.fit(data(), batch_size=10, steps=3)
        model, optimizer = trainer.run.model, trainer.run.optimizer
        model.append(nn.Linear(4, 4))
        optimizer.add_param_group({"params": model[-1].parameters()})
        with torch.no_grad():
            model[-1].weight.fill_(0.1)
            model[-1].bias.fill_(0.1)
        trainer.fit(data(), batch_size=10, steps=7)
        return trainer.digest()

    assert trained("sim") == trained("cpu")


@pytest.mark.slow
def test_what_does_not_fit_into_memory_is_named(accelerator):
    trainer = make("sim")
    accelerator.limit(0, torch.sim.memory_allocated(0) + 3000)
    with pytest.raises(unisono.errors.OutOfMemoryError, match="memory of sim:0 must hold"):
        trainer.fit(data(), **FIT)
    accelerator.limit(0, None)
    trainer.fit(data(), **FIT)


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
        trainer = make("sim")
        trainer.fit(data(), batch_size=10, steps=2)
        before = torch.sim.memory_allocated(0)
        for steps in (3, 4, 5):
            trainer.fit(data(), batch_size=10, steps=steps)
        return torch.sim.memory_allocated(0) - before

    assert left() == 0


@pytest.mark.slow
def test_weights_trained_there_are_loaded_on_the_cpu(accelerator, tmp_path):
    trainer = make("sim", directory=tmp_path / "a run")
    trainer.fit(data(), **FIT)
    trainer.save(tmp_path / "weights.safetensors")
    expected = {name: value.cpu() for name, value in trainer.run.model.state_dict().items()}
    for source in (tmp_path / "a run", tmp_path / "weights.safetensors"):
        model = net()
        unisono.load_weights(source, model)
        for name, value in model.state_dict().items():
            assert value.device.type == "cpu"
            assert torch.equal(value, expected[name]), name
