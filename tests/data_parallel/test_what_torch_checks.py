"""What torch's own tests of DataParallel check, on simulated devices, with tests of ours.

Others have their counterpart in the files beside this one and in ``tests/parity``.
"""

from __future__ import annotations

import gc

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd import gradcheck

import unisono


def parallel(module, device_ids=(0, 1), **options):
    return unisono.DataParallel(module.to(f"sim:{device_ids[0]}"), device_ids, **options)


@pytest.mark.parametrize("unused", ["nothing", [], {}, ()])
def test_keyword_arguments_alone(unused, accelerator):
    class Net(nn.Linear):
        def forward(self, input):
            return super().forward(input if unused == "nothing" else input["data"])

    model, x = parallel(Net(10, 5)), torch.randn(20, 10)
    made = model(input=x if unused == "nothing" else {"data": x, "unused": unused})
    torch.testing.assert_close(
        made, F.linear(x.to("sim:0"), model.module.weight, model.module.bias)
    )


@pytest.mark.parametrize("device_ids", [[0], [0, 1]])
def test_a_module_without_inputs_is_called_once(device_ids, accelerator):
    class Net(nn.Module):
        def forward(self):
            return torch.eye(2, 3, device="sim:0")

    made = parallel(Net(), device_ids)()
    assert made.equal(torch.eye(2, 3, device="sim:0"))


@pytest.mark.parametrize("device_ids", [[0], [0, 1], [1, 0], [0, 1, 2, 3]])
@pytest.mark.parametrize("is_given", [True, False])
def test_several_inputs_of_several_kinds(device_ids, is_given, accelerator):
    class Net(nn.Module):
        def forward(self, one, other, factor, added=None):
            made = factor * (one * other)
            return made if added is None else made + added

    one, other, added = (torch.randn(5, 5) for _ in range(3))
    one.requires_grad_()
    other.requires_grad_()
    options = {"added": added} if is_given else {}
    results = []
    for each in (Net(), parallel(Net(), device_ids)):
        made = each(one, other, 0.7, **options)
        made.sum().backward()
        results.append((made.tolist(), one.grad.tolist(), other.grad.tolist()))
        one.grad = other.grad = None
    assert results[0] == results[1]


def test_buffers_may_take_gradients(accelerator):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("trained", torch.randn(3, dtype=torch.double, requires_grad=True))
            self.register_buffer("fixed", torch.randn(3, dtype=torch.double))

        def forward(self, x):
            return x * self.trained + self.fixed

    module = Net()
    module.trained = module.trained.detach().to("sim:0").requires_grad_()
    model, x = parallel(module), torch.randn(2, 3, dtype=torch.double)
    assert gradcheck(lambda _: model(x), (module.trained,), check_batched_grad=False)
    model(x).sum().backward()
    torch.testing.assert_close(module.trained.grad.cpu(), x.sum(0))


def test_complex_parameters_stay_complex(accelerator):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.shift = nn.Parameter(torch.full((1, 4), 2j))

        def forward(self, x):
            return x + self.shift

    model = unisono.DataParallel(Net(), ["cpu", "cpu"])  # the accelerator has no complex numbers
    x = torch.randn(3, 4, dtype=torch.cfloat)
    made = model(x)
    assert made.equal(x + 2j)
    made.abs().sum().backward()
    assert model.module.shift.grad.dtype == torch.cfloat


def test_no_cycle_is_left_behind_on_devices(accelerator):
    model = parallel(nn.Linear(1, 1), [0, 1, 2])
    model(torch.randn(6, 1))
    gc.collect()
    model(torch.randn(6, 1)).sum().backward()
    assert gc.collect() == 0


@pytest.mark.parametrize("dtypes", ["f f", "f h", "h h"])
@pytest.mark.parametrize("formats", ["c c", "l c", "l l"])
def test_gradients_have_the_layout_of_their_parameters(dtypes, formats, accelerator):
    layouts = {"c": torch.contiguous_format, "l": torch.channels_last}
    kinds = {"f": torch.float, "h": torch.bfloat16}

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(
                nn.Conv2d(4, 4, 2).to(memory_format=layouts[layout], dtype=kinds[kind])
                for layout, kind in zip(formats.split(), dtypes.split(), strict=True)
            )

        def forward(self, x):
            for layer in self.layers:
                x = layer(x.to(layer.weight.dtype))
            return x

    torch.manual_seed(0)
    module = Net()
    x = torch.randn(6, 4, 5, 5)
    module(x).float().square().mean().backward()
    expected = [parameter.grad.clone() for parameter in module.parameters()]
    model = parallel(module)
    for _ in range(2):
        model.zero_grad()
        model(x).float().square().mean().backward()
        for layer, layout in zip(module.layers, formats.split(), strict=True):
            assert layer.weight.grad.is_contiguous(memory_format=layouts[layout])
        for parameter, gradient in zip(module.parameters(), expected, strict=True):
            torch.testing.assert_close(parameter.grad.cpu(), gradient, rtol=2e-2, atol=1e-3)


@pytest.mark.parametrize("kind", ["list", "dict"])
def test_lists_and_dicts_of_parameters_have_replicas(kind, accelerator):
    parameters = [nn.Parameter(torch.rand(10)) for _ in range(2)]
    named = {"0": parameters[0], "1": parameters[1]}

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.data = nn.ParameterList(parameters) if kind == "list" else nn.ParameterDict(named)

        def forward(self, x):
            for key, parameter in enumerate(parameters):
                own = self.data[key if kind == "list" else str(key)]
                assert own.device == x.device
                assert own.requires_grad
                assert own.grad_fn is not None
                assert own.tolist() == parameter.tolist()
            assert len(self.data) == 2
            return x

    parallel(Net())(torch.randn(8, 8))
