"""What programs do with a DataParallel, on a machine without any accelerator."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F
from tests.data_parallel.networks import Cnn, bits_of, images, train
from torch import nn
from torch.nn.utils import parametrizations

import unisono
from unisono.runtime.device import notices

TWO = ["cpu", "cpu"]


class Outputs(nn.Module):
    """Two outputs with a layer each, and a shared one below."""

    def __init__(self):
        super().__init__()
        self.below, self.one, self.other = nn.Linear(3, 3), nn.Linear(3, 2), nn.Linear(3, 2)

    def forward(self, x):
        x = self.below(x)
        return {"one": self.one(x), "other": self.other(x)}


def wrapped(module, device_ids=TWO, **options):
    return unisono.DataParallel(module, device_ids, **options)


def gradients(model):
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def test_it_is_torchs_class():
    model = wrapped(nn.Linear(2, 2))
    assert isinstance(model, nn.DataParallel)
    assert model.device_ids == [torch.device("cpu")] * 2
    assert model.output_device == torch.device("cpu")
    assert (model.shards, model.dim) == (2, 0)


def test_without_an_accelerator_the_module_is_called():
    torch.manual_seed(0)
    module = Cnn()
    model = unisono.DataParallel(copy.deepcopy(module))
    assert model.device_ids == []
    results = []
    for each in (module, model):
        torch.manual_seed(1)
        results.append((train(each, images), bits_of(each if each is module else each.module)))
    assert results[0] == results[1]


def test_without_an_accelerator_chunks_are_computed_if_asked_for():
    sizes = []

    class Net(nn.Linear):
        def forward(self, x):
            sizes.append(len(x))
            return super().forward(x)

    unisono.DataParallel(Net(2, 2), shards=4)(torch.zeros(10, 2))
    assert sizes == [3, 3, 3, 1]


def test_gradients_are_added_along_the_tree():
    model = wrapped(nn.Linear(1, 1, bias=False), shards=6)
    x = torch.tensor([[1e8], [1.0], [-1e8], [1.0], [1.0], [0.3]])
    model(x).sum().backward()
    g = [float(value) for value in x]
    tree = ((torch.tensor(g[0]) + g[1]) + (torch.tensor(g[2]) + g[3])) + (torch.tensor(g[4]) + g[5])
    left = sum(torch.tensor(g), torch.tensor(0.0))
    seen = model.module.weight.grad.item()
    assert seen == tree.item() != left.item()


def test_parameters_without_a_gradient_keep_none():
    model = wrapped(Outputs(), shards=3)
    out = model(torch.ones(6, 3))
    out["one"].sum().backward()
    given = gradients(model.module)
    assert given["other.weight"] is given["other.bias"] is None
    assert given["below.weight"] is not None


def test_only_some_chunks_have_a_gradient():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight, self.rare = (nn.Parameter(torch.ones(1)) for _ in range(2))

        def forward(self, x):
            return x * (self.rare if x.sum() > 10 else self.weight)

    model = wrapped(Net(), shards=4)
    model(torch.tensor([1.0, 2.0, 30.0, 4.0])).sum().backward()
    assert (model.module.weight.grad.item(), model.module.rare.grad.item()) == (7, 30)


@pytest.mark.parametrize("set_to_none", [True, False])
def test_gradients_accumulate_over_passes(set_to_none):
    torch.manual_seed(0)
    module = Outputs()
    model = wrapped(copy.deepcopy(module), shards=3)
    for each in (module, model):
        each(torch.ones(6, 3))["one"].sum().backward()
        each.zero_grad(set_to_none=set_to_none)
        for scale in (1.0, 2.0):
            outputs = each(torch.full((6, 3), scale))
            (outputs["one"].square().mean() + outputs["other"].mean()).backward()
    for name, plain in gradients(module).items():
        torch.testing.assert_close(gradients(model.module)[name], plain)


@pytest.mark.parametrize("frozen", [True, False])
def test_without_gradients_nothing_is_recorded(frozen):
    model = wrapped(nn.Linear(3, 1).requires_grad_(not frozen))
    for mode in (torch.no_grad(), torch.inference_mode()):
        with mode:
            assert not model(torch.ones(4, 3)).requires_grad
    assert model(torch.ones(4, 3)).requires_grad is not frozen


def test_chunks_draw_different_numbers_and_so_do_calls():
    class Noise(nn.Module):
        def forward(self, x):
            return x + torch.rand(len(x))

    torch.manual_seed(0)
    model, x = wrapped(Noise(), shards=2), torch.zeros(4)
    drawn = torch.stack([model(x), model(x)])
    assert len(drawn.unique()) == 8
    torch.manual_seed(0)
    assert torch.stack([model(x), model(x)]).equal(drawn)


def test_generators_are_where_one_number_was_drawn():
    torch.manual_seed(0)
    wrapped(nn.Dropout(0.5), shards=4)(torch.ones(100))
    after = torch.rand(1)
    torch.manual_seed(0)
    torch.empty((), dtype=torch.int64).random_()
    assert torch.rand(1).equal(after)


def test_batchnorm_keeps_the_first_chunks_averages():
    first = nn.BatchNorm1d(3)
    model = wrapped(nn.BatchNorm1d(3), shards=4)
    for step in range(3):
        x = torch.randn(8, 3, generator=torch.Generator().manual_seed(step))
        first(x[:2])
        model(x)
    for name, buffer in first.named_buffers():
        assert model.module.get_buffer(name).equal(buffer), name


def test_every_chunk_starts_from_the_modules_buffers():
    class Counter(nn.Module):
        def __init__(self, replaces):
            super().__init__()
            self.replaces = replaces
            self.register_buffer("count", torch.zeros(1))

        def forward(self, x):
            if self.replaces:
                self.count = self.count + len(x)
            else:
                self.count += len(x)
            return x * 0 + self.count

    for replaces in (True, False):
        model = wrapped(Counter(replaces), shards=3)
        assert model(torch.zeros(6)).tolist() == [2] * 6
        assert model(torch.zeros(5)).tolist() == [4, 4, 4, 4, 3]
        assert model.module.count.item() == 4


def test_replicas_list_their_parameters():
    class Net(nn.Linear):
        def forward(self, x):
            device = next(self.parameters()).device
            assert [name for name, _ in self.named_parameters()] == ["weight", "bias"]
            return super().forward(x.to(device))

    wrapped(Net(2, 2))(torch.ones(4, 2))


def test_changes_of_the_modules_own_attributes_are_lost():
    class Net(nn.Module):
        calls = 0

        def forward(self, x):
            self.calls += 1
            return x

    model = wrapped(Net())
    model(torch.ones(4))
    assert model.module.calls == 0


@pytest.mark.parametrize(
    "copied", [copy.deepcopy, copy.copy, lambda model: pickle.loads(pickle.dumps(model))]
)
def test_copies_compute_alike(copied):
    model, x = wrapped(nn.Linear(2, 2), shards=3), torch.ones(6, 2)
    expected = model(x)
    made = copied(model)
    assert made(x).equal(expected)
    assert (made.shards, made.device_ids) == (3, model.device_ids)


def test_it_may_be_a_part_of_a_model_and_have_one_as_part():
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(3, 3), nn.ReLU(inplace=True), nn.Linear(3, 1))
    made = copy.deepcopy(plain)
    inner = wrapped(nn.Sequential(wrapped(made[1], shards=2), made[2]), shards=3)
    model = nn.Sequential(made[0], inner)
    x = torch.randn(7, 3)
    for each in (plain, model):
        each(x).square().sum().backward()
    for one, other in zip(plain.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad)


@pytest.mark.parametrize("norm", [parametrizations.weight_norm, parametrizations.spectral_norm])
def test_parametrized_weights_work(norm):
    torch.manual_seed(0)
    module = norm(nn.Linear(4, 4))
    model = wrapped(copy.deepcopy(module), shards=1)
    chunked = wrapped(copy.deepcopy(module), shards=2)
    x = torch.randn(4, 4)
    for each in (module, model, chunked):
        each(x).square().sum().backward()
    for plain, one, two in zip(*map(gradients_in_order, (module, model, chunked)), strict=True):
        assert one.equal(plain)
        torch.testing.assert_close(two, plain)


def gradients_in_order(model):
    return [parameter.grad for parameter in model.parameters()]


def test_modules_with_a_forward_of_their_own_compute_with_the_replica():
    module = nn.Linear(2, 2)
    module.forward = module.forward  # bound to the original, as wrappers do
    model = wrapped(module)
    model(torch.ones(4, 2)).sum().backward()
    name = type(model(torch.ones(4, 2)).grad_fn).__name__
    assert name == "CatBackward0"
    assert module.weight.grad.tolist() == [[4, 4], [4, 4]]


def test_sparse_gradients_are_added_along_the_tree():
    model = wrapped(nn.Embedding(1, 1, sparse=True), shards=6)
    scales = torch.tensor([1e8, 1.0, -1e8, 1.0, 1.0, 0.3])
    outputs = model(torch.zeros(12, dtype=torch.long)).view(6, 2)
    (outputs * torch.stack([scales, torch.zeros(6)], 1)).sum().backward()
    g = [*scales]
    tree = ((g[0] + g[1]) + (g[2] + g[3])) + (g[4] + g[5])
    assert model.module.weight.grad.is_coalesced()
    assert model.module.weight.grad.to_dense().item() == tree.item()


def test_gradients_of_gradients():
    """A penalty on the inputs' gradients, as some GANs have it."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))
    model = wrapped(copy.deepcopy(module), shards=3)
    for each in (module, model):
        x = torch.linspace(-1, 1, 24).view(6, 4).requires_grad_()
        (found,) = torch.autograd.grad(each(x).sum(), x, create_graph=True)
        (found.norm(dim=1) - 1).square().mean().backward()
    for one, other in zip(module.parameters(), model.parameters(), strict=True):
        assert (one.grad is None) == (other.grad is None)
        if one.grad is not None:
            torch.testing.assert_close(one.grad, other.grad)


def test_autocast_reaches_the_chunks():
    model = wrapped(nn.Linear(4, 4))
    with torch.autocast("cpu", torch.bfloat16):
        assert model(torch.ones(4, 4)).dtype == torch.bfloat16


def test_hooks_are_called_for_each_chunk():
    sizes = []
    module = nn.Linear(2, 2)
    module.register_forward_hook(lambda module, args, output: sizes.append(len(output)))
    wrapped(module, shards=3)(torch.ones(5, 2))
    assert sizes == [2, 2, 1]


def test_a_batch_smaller_than_the_number_of_devices():
    model = wrapped(nn.Linear(2, 2), ["cpu"] * 4)
    for samples in range(5):
        x = torch.randn(samples, 2)
        torch.testing.assert_close(model(x), model.module(x))


def test_also_a_single_chunk_has_weights_of_its_own():
    """Else gradients of two calls would meet at the parameter in any order."""
    seen = []
    module = nn.Linear(2, 2)
    module.register_forward_pre_hook(lambda replica, args: seen.append(replica.weight))
    model = wrapped(module)
    model(torch.ones(1, 2)).sum().backward()
    assert seen[0].grad_fn is not None
    assert module.weight.grad.tolist() == [[1, 1], [1, 1]]


def test_an_own_way_to_cut_and_to_gather():
    class Lists(unisono.DataParallel):
        def scatter(self, inputs, kwargs, device_ids):
            return tuple((item,) for item in inputs[0]), ({},) * len(inputs[0])

        def gather(self, outputs, output_device):
            return list(outputs)

    model = Lists(nn.Linear(2, 2), ["cpu"] * 3)
    assert [len(out) for out in model([torch.ones(1, 2), torch.ones(5, 2)])] == [1, 5]


# What is refused


def test_devices_are_checked():
    module = nn.Linear(2, 2)
    with pytest.raises(ValueError, match="has cuda:0, and torch finds 0 of type cuda on this"):
        unisono.DataParallel(module, ["cuda:0"])
    with pytest.raises(TypeError, match=r"must name devices of torch, .* one is 'gpu0'"):
        unisono.DataParallel(module, ["gpu0"])
    with pytest.raises(TypeError, match="`output_device` must name devices"):
        unisono.DataParallel(module, TWO, output_device="here")
    with pytest.raises(TypeError, match=r"must be a list .* but is 0: pass `device_ids=\[0\]`"):
        unisono.DataParallel(module, 0)
    for dim in ("0", None, 0.0):
        with pytest.raises(TypeError, match="`dim` must be a whole number, but is"):
            unisono.DataParallel(module, TWO, dim=dim)
    for shards in (0, -1, 2.5, "two", True):
        with pytest.raises(ValueError, match="`shards` must be a whole number from 1 on, but is"):
            unisono.DataParallel(module, TWO, shards=shards)
    with pytest.raises(TypeError, match=r"`module` must be a torch.nn.Module, but is <function"):
        unisono.DataParallel(F.relu, TWO)


def test_numbers_are_the_cpu_where_there_is_no_accelerator(capfd):
    notices().discard("no accelerator")
    numbered = unisono.DataParallel(nn.Linear(2, 2), [0, 1], output_device=0)
    assert numbered.device_ids == [torch.device("cpu")] * 2
    assert numbered(torch.ones(4, 2)).shape == (4, 2)
    assert capfd.readouterr().err.count("torch finds no accelerator here") == 1


def test_a_module_that_is_elsewhere_is_refused():
    model = wrapped(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, device="meta")))
    with pytest.raises(
        RuntimeError,
        match=r"on device cpu \(device_ids\[0\]\) but found .* on device: meta \(`1.weight`",
    ):
        model(torch.ones(4, 2))


def test_lazy_modules_are_refused_until_they_have_a_shape():
    model = wrapped(nn.LazyLinear(2))
    with pytest.raises(RuntimeError, match=r"Modules with uninitialized parameters.*`weight`"):
        model(torch.ones(4, 2))
    model.module(torch.ones(4, 2))
    assert model(torch.ones(4, 2)).shape == (4, 2)


def test_compiled_modules_are_refused():
    compiled = nn.Sequential(nn.Linear(2, 2))
    compiled[0].compile(backend="eager")
    with pytest.raises(ValueError, match="wrapped before it is compiled, but `0` is compiled"):
        wrapped(compiled)
    with pytest.raises(ValueError, match="wrapped before it is compiled, but the module"):
        wrapped(torch.compile(nn.Linear(2, 2), backend="eager"))
