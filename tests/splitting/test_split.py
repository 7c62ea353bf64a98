"""A model on several devices computes what it computes on one, bit for bit."""

import copy

import pytest
import torch
import torch.nn.functional as F
from tests.splitting.models import CNN, GPT, MODELS, Dense, trained
from torch import nn

from unisono.engine.splitting.split import split, split_of

DEVICES = (["sim:0", "sim:1"], ["sim:0", "sim:1", "sim:2"], ["sim:3", "sim:1", "sim:2", "sim:0"])


pytestmark = pytest.mark.usefixtures("optimizers_are_imported")


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.filterwarnings("ignore")
def test_bits_are_those_of_one_device(name, accelerator):
    expected = trained(MODELS[name], ["sim:1"])
    assert trained(MODELS[name], ["cpu"])[0] == expected[0]
    for devices in DEVICES:
        assert trained(MODELS[name], devices) == expected, devices


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["GPT", *(name for name in MODELS if "Recomp" in name)])
def test_layers_may_be_on_any_device_in_any_order(name, accelerator):
    balance = {
        "sim:0": ["embedding", "position", "blocks.1", "blocks.2.out", "head"],
        "sim:1": ["blocks", "norm"],
    }
    found = trained(MODELS[name], ["sim:0", "sim:1"], balance=balance)
    assert found == trained(MODELS[name], ["cpu"])


@pytest.mark.slow
def test_gradients_are_added_up_in_the_order_of_one_device(accelerator):
    expected = trained(Dense, ["cpu"])
    for devices in DEVICES:
        assert trained(Dense, devices) == expected, devices
    back = {"sim:0": ["first", "layers.1", "layers.4", "out"], "sim:1": ["layers"]}
    assert trained(Dense, ["sim:0", "sim:1"], balance=back) == expected


def test_names_and_objects_stay(accelerator):
    model = GPT()
    names, objects = list(model.state_dict()), [*map(id, model.parameters())]
    assert split(model, ["sim:0", "sim:1"]) is model
    assert list(model.state_dict()) == names
    assert [*map(id, model.parameters())] == objects
    assert model.head.weight is model.embedding.weight
    devices = [str(parameter.device) for parameter in model.parameters()]
    assert devices == sorted(devices)
    assert set(devices) == {"sim:0", "sim:1"}


def test_a_model_may_be_split_again_and_put_together(accelerator):
    model = GPT()
    split(model, ["sim:0", "sim:1"])
    split(model, ["sim:2", "sim:3", "sim:1"])
    assert {str(p.device) for p in model.parameters()} == {"sim:2", "sim:3", "sim:1"}
    split(model, ["sim:3"])
    assert {str(p.device) for p in model.parameters()} == {"sim:3"}


def test_a_copy_of_a_split_model_is_split(accelerator):
    model = split(CNN(), ["sim:0", "sim:1"]).eval()
    twin = copy.deepcopy(model)
    images = model.batch(torch.Generator().manual_seed(1))[0].to("sim:0")
    with torch.no_grad():
        expected = model(images).tolist()
        for parameter in model.parameters():
            parameter.zero_()
        assert twin(images).tolist() == expected
    assert split_of(twin) is not split_of(model)


def test_a_part_may_be_called_alone(accelerator):
    model = split(GPT(), ["sim:0", "sim:1"]).eval()
    x = torch.randn(2, 8, 16, device="sim:0")
    assert str(model.blocks[2](x).device) == "sim:1"
    assert str(model.norm(x).device) == "sim:1"


class InPlace(nn.Linear):
    def forward(self, x):
        return super().forward(x.relu_())


class Outputs(nn.Module):
    """Gives out what the cut has been crossed with."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), InPlace(4, 4)

    def forward(self, x):
        hidden = self.first(x)
        return {"hidden": hidden, "out": (self.second(hidden), [hidden])}


def test_outputs_are_where_the_pass_has_brought_them(accelerator):
    model = split(Outputs(), ["sim:0", "sim:1"])
    found = model(torch.randn(2, 4, device="sim:0"))
    assert found["hidden"] is found["out"][1][0]
    assert str(found["hidden"].device) == "sim:1"
    assert (found["hidden"] >= 0).all()  # as `second` has changed it in place


class Mistaken(Outputs):
    def forward(self, x):
        hidden = self.first(x)
        other = hidden.view(-1)
        self.second(hidden)
        other.add_(1)
        return hidden + 1


def test_what_is_changed_on_both_sides_of_a_cut_is_refused(accelerator):
    model = split(Mistaken(), ["sim:0", "sim:1"])
    words = "in place on one side of a cut, but was on sim:0 and on sim:1"
    with torch.no_grad(), pytest.raises(RuntimeError, match=words):
        model(torch.randn(2, 4, device="sim:0"))


def test_a_pass_without_gradients_takes_none_from_the_next(accelerator):
    class Twice(Outputs):
        def forward(self, x):
            hidden = self.first(x)
            with torch.no_grad():
                F.linear(hidden, self.second.weight)
            return F.linear(hidden, self.second.weight)

    model = split(Twice(), ["sim:0", "sim:1"])
    model(torch.randn(2, 4, device="sim:0")).sum().backward()
    assert model.first.weight.grad is not None


def test_nothing_is_watched_after_a_pass_that_fails(accelerator):
    class Failing(Outputs):
        def forward(self, x):
            self.second(self.first(x))
            raise KeyboardInterrupt

    model = split(Failing(), ["sim:0", "sim:1"])
    with pytest.raises(KeyboardInterrupt):
        model(torch.randn(2, 4, device="sim:0"))
    assert torch.overrides._get_current_function_mode_stack() == []
    one, other = torch.ones(1, device="sim:0"), torch.ones(1, device="sim:1")
    with pytest.raises(RuntimeError):
        one + other


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ((None, ["cpu"]), TypeError, "`model` must be a torch.nn.Module"),
        ((nn.Linear(2, 2), "cpu"), TypeError, "`devices` must be a list of devices"),
        ((nn.Linear(2, 2), []), ValueError, "at least one device"),
        ((nn.Linear(2, 2), ["gpu"]), TypeError, "one is 'gpu'"),
        ((nn.Linear(2, 2), [3.5]), TypeError, "one is 3.5"),
        ((nn.Linear(2, 2), ["cpu", "cuda:0"]), ValueError, "must be there|of one type"),
        ((nn.Linear(2, 2), ["cpu", "cpu"]), ValueError, "1 parts .* for 2 devices"),
        ((nn.ReLU(), ["cpu"]), ValueError, "0 parts"),
        ((nn.Sequential(nn.LazyLinear(2)), ["cpu"]), ValueError, "`0.weight` is lazy"),
        (
            (nn.Linear(2, 2), ["cpu"], "speed"),
            ValueError,
            "must be 'memory' or names by device, but is 'speed'",
        ),
    ],
)
def test_wrong_arguments_are_refused(arguments, error, words):
    with pytest.raises(error, match=words):
        split(*arguments)


def test_devices_have_numbers_that_are_there(accelerator):
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    for name, words in (
        ("sim", "a number, or none"),
        ("sim:7", "would need sim:7 and there are 4"),
    ):
        with pytest.raises(ValueError, match=words):
            split(model, ["sim:0", name])
    split(model, ["sim"] * 2)
    assert [str(layer.weight.device) for layer in model] == ["sim:0", "sim:1"]
    with pytest.raises(ValueError, match="of one type"):
        split(model, ["cpu", "sim:0"])


def test_scripted_models_are_refused():
    with pytest.warns((DeprecationWarning, FutureWarning), match="torch.jit"):
        model = nn.Sequential(nn.Linear(2, 2), torch.jit.script(nn.Linear(2, 2)))
    with pytest.raises(ValueError, match="`1` is TorchScript"):
        split(model, ["cpu", "cpu"])


class Shared(nn.Module):
    """Two layers with statistics in common."""

    def __init__(self):
        super().__init__()
        self.one, self.other, self.out = nn.BatchNorm1d(4), nn.BatchNorm1d(4), nn.Linear(4, 40)
        self.other.running_mean = self.one.running_mean

    def forward(self, x):
        return self.out(self.other(self.one(x)))


def test_layers_with_one_buffer_are_on_one_device(accelerator):
    model = Shared()
    with pytest.raises(
        ValueError, match=r"`one\.running_mean` is a buffer of `one` and of `other`"
    ):
        split(model, ["sim:0", "sim:1"], {0: ["one"], 1: ["other", "out"]})
    assert split_of(model) is None
    split(model, ["sim:0", "sim:1"])
    assert model.one.running_mean is model.other.running_mean
    assert str(model.other.running_mean.device) == "sim:0"


def test_a_layer_that_has_come_since_is_refused(accelerator):
    model = split(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), ["sim:0", "sim:1"])
    model.append(nn.Linear(2, 2))
    with pytest.raises(ValueError, match="`2` has come since: call"):
        split_of(model).place(model)


def test_a_layer_that_is_larger_than_a_device_is_named(monkeypatch, capsys):
    from unisono.runtime.device import Device

    monkeypatch.setattr(Device, "room", lambda self: (None, 64_000))
    split(nn.Sequential(nn.Linear(30, 30), nn.Linear(30, 4), nn.Linear(4, 700)), ["cpu", "cpu"])
    assert capsys.readouterr().err == ""
    split(nn.Sequential(nn.Linear(4, 30), nn.Linear(30, 900)), ["cpu", "cpu"])
    said = capsys.readouterr().err
    assert "`1` alone takes 436 KiB in training" in said
    assert said.count("alone") == 1
    table = nn.Embedding(3000, 10)  # what is looked up, in the place of what is multiplied
    split(nn.Sequential(table, nn.Linear(10, 4)), ["cpu", "cpu"])
    assert "`0` alone takes 469 KiB in training" in capsys.readouterr().err
