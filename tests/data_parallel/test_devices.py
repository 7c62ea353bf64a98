"""DataParallel on several devices: the simulated ones of ``tests/accelerator``."""

from __future__ import annotations

import copy
import threading

import pytest
import torch
import torch.nn.functional as F
from tests.data_parallel.networks import Cnn, images
from torch import nn
from torch.utils.checkpoint import checkpoint

import unisono

WAIT_S = 0.3


def where(model, x):
    """Tell on which device each chunk was computed."""
    seen = []
    handle = model.module.register_forward_pre_hook(
        lambda _, args: seen.append(str(args[0].device))
    )
    model(x)
    handle.remove()
    return seen


def test_devices_may_be_given_in_each_way(accelerator):
    def devices(*args, **options):
        return [
            str(device)
            for device in unisono.DataParallel(nn.Linear(2, 2), *args, **options).devices
        ]

    assert devices() == ["sim:0", "sim:1", "sim:2", "sim:3"]
    assert devices([1, "sim:0", torch.device("sim", 2)]) == ["sim:1", "sim:0", "sim:2"]
    torch.sim.set_device(3)
    assert devices(["sim", 1]) == ["sim:3", "sim:1"]
    assert devices(["cpu", "cpu"]) == ["cpu", "cpu"]
    assert devices([]) == []
    model = unisono.DataParallel(nn.Linear(2, 2), [1, 0])
    assert (model.device_ids, model.output_device) == ([1, 0], 1)
    assert model.src_device_obj == torch.device("sim:1")
    with pytest.raises(ValueError, match=r"of one type, but are of cpu and sim \(sim:0, cpu\)"):
        unisono.DataParallel(nn.Linear(2, 2), [0, "cpu"])
    with pytest.raises(ValueError, match="has sim:4, and torch finds 4 of type sim"):
        unisono.DataParallel(nn.Linear(2, 2), [0, 4])


def test_one_device_takes_the_module(accelerator):
    model = unisono.DataParallel(nn.Linear(2, 2), [2])
    assert str(model.module.weight.device) == str(model(torch.ones(3, 2)).device) == "sim:2"


def test_chunks_go_to_devices_in_contiguous_ranges(accelerator):
    model = unisono.DataParallel(nn.Linear(2, 2).to("sim:2"), [2, 0, 1], shards=5)
    assert where(model, torch.ones(10, 2)) == ["sim:2", "sim:2", "sim:0", "sim:0", "sim:1"]
    assert where(model, torch.ones(2, 2)) == ["sim:2", "sim:0"]
    assert where(model, torch.ones(1, 2)) == ["sim:2"]


@pytest.mark.parametrize(
    ("output", "device"), [(None, "sim:1"), (0, "sim:0"), ("cpu", "cpu"), (-1, "cpu")]
)
@pytest.mark.parametrize("source", ["cpu", "sim:3", "sim:1"])
def test_inputs_may_be_anywhere_and_outputs_go_where_they_should(
    output, device, source, accelerator
):
    module = nn.Linear(2, 2).to("sim:1")
    model = unisono.DataParallel(module, [1, 0, 2], output)
    x = torch.ones(5, 2, device=source, requires_grad=True)
    made = model(x)
    assert str(made.device) == device
    made.sum().backward()
    assert x.grad.equal(module.weight.sum(0).detach().expand(5, 2).to(source))


def test_the_device_of_a_chunk_is_the_current_one(accelerator):
    class Net(nn.Module):
        def forward(self, x):
            assert torch.sim.current_device() == x.device.index
            return x + torch.ones(1, device="sim")

    torch.sim.set_device(3)
    unisono.DataParallel(Net(), [1, 0])(torch.ones(4))
    assert torch.sim.current_device() == 3


def test_recurrent_layers_compute_with_their_devices_weights(accelerator):
    torch.manual_seed(0)
    module = nn.LSTM(3, 4, batch_first=True, bidirectional=True)
    x, gradients = torch.randn(6, 5, 3), []
    for device_ids in (["cpu", "cpu"], [0, 1]):
        made = copy.deepcopy(module).to("sim:0" if 0 in device_ids else "cpu")
        made.flatten_parameters()
        unisono.DataParallel(made, device_ids)(x)[0].square().mean().backward()
        gradients.append([parameter.grad.tolist() for parameter in made.parameters()])
    assert gradients[0] == gradients[1]


def test_an_exception_names_the_device(accelerator):
    class Net(nn.Module):
        def forward(self, x):
            raise ValueError("no") if x.device.index else KeyError(x.device)

    with pytest.raises(KeyError) as raised:
        unisono.DataParallel(Net(), [0, 1])(torch.ones(4))
    assert "chunk 0 of 2 (counted from 0) on device sim:0" in raised.value.__notes__[0]
    with pytest.raises(ValueError, match="no") as raised:
        unisono.DataParallel(Net(), [1, 0])(torch.ones(4))
    assert "chunk 0 of 2 (counted from 0) on device sim:1" in raised.value.__notes__[0]


@pytest.mark.parametrize(
    ("devices", "on", "is_refused"),
    [
        ([0, 1], ["cpu"], True),
        ([0, 1], ["sim:1"], True),
        ([1, 0], ["sim:0"], True),
        ([0, 1], ["sim:0"], False),
        ([1, 0], ["sim:1"], False),
        ([0, 1], ["cpu", "sim:0"], True),
        ([0, 1], ["sim:0", "sim:1"], True),
        ([0, 1], ["sim:0", "sim:0"], False),
        (None, ["sim:0"], False),
        (None, ["cpu"], True),
    ],
)
def test_the_module_must_be_on_the_first_device(devices, on, is_refused, accelerator):
    module = nn.Sequential(*(nn.Linear(2, 2).to(device) for device in on))
    model = unisono.DataParallel(module, devices)
    first = devices[0] if devices else 0
    if is_refused:
        message = f"module must have its parameters and buffers on device sim:{first} "
        with pytest.raises(RuntimeError, match=message):
            model(torch.ones(4, 2))
        model.to(f"sim:{first}")
    assert model(torch.ones(4, 2)).shape == (4, 2)


def test_a_training_step_never_waits_for_a_device(accelerator):
    module = Cnn().to("sim:0")
    model = unisono.DataParallel(module, [0, 1], shards=4)
    optimizer = torch.optim.AdamW(filter(lambda each: each.requires_grad, model.parameters()))
    inputs, labels = (tensor.pin_memory() for tensor in images(0))
    with accelerator.synchronizations() as seen:
        for _ in range(2):
            loss = F.cross_entropy(model(inputs), labels.to("sim:0", non_blocking=True))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    assert seen == []


# Autograd's threads


class Three(nn.Module):
    """A weight whose gradient depends on the order in which three of them are added."""

    def __init__(self, noted):
        super().__init__()
        self.weight, self.noted = nn.Parameter(torch.ones(1)), noted

    def forward(self, x):
        made = [x * scale * self.weight for scale in (1.0, 1e8, -1e8)]
        if made[0].device.index == 1:
            made[0].register_hook(lambda gradient: self.noted.set())
        return made[::-1]


def waited(event, seconds):
    event.wait(seconds)


def gradient_of_three(device_ids):
    noted = threading.Event()
    model = unisono.DataParallel(Three(noted).to(device_ids[0]), device_ids, shards=2)
    last, middle, first = model(torch.tensor([0.0, 1.0]))
    # Device 1 may begin with the gradient of the first before the others' are on their way.
    middle.register_hook(lambda gradient: waited(noted, WAIT_S))
    (last.sum() + middle.sum() + first.sum()).backward()
    return model.module.weight.grad.item()


def test_gradients_within_a_chunk_meet_in_one_order(accelerator):
    assert gradient_of_three(["sim:0"]) == gradient_of_three(["sim:0", "sim:1"]) == 1


def test_checkpoints_on_two_devices_leave_the_hosts_generator_alone(accelerator):
    """Each region is entered while the other is computed again, and left in the same order."""
    entered, left = [threading.Event() for _ in range(2)], threading.Event()

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight, self.is_again = nn.Parameter(torch.ones(1)), False

        def forward(self, x):
            chunk = x.device.index

            def region(x):
                if torch.is_grad_enabled() and calls.pop(chunk, None) is None:
                    entered[chunk].set()
                    (entered[1] if chunk == 0 else left).wait(10)
                return (x * self.weight).sin()

            x = x * self.weight
            if chunk == 0:
                x.register_hook(lambda gradient: left.set())
            y = checkpoint(region, x, use_reentrant=False)
            if chunk == 1:
                y.register_hook(lambda gradient: waited(entered[0], 10))
            return y

    calls = {0: "first", 1: "first"}
    model = unisono.DataParallel(Net().to("sim:0"), [0, 1])
    outputs = model(torch.ones(4))
    before = torch.get_rng_state()
    outputs.sum().backward()
    assert all(event.is_set() for event in [*entered, left])
    assert torch.get_rng_state().equal(before)
