"""Layers, parameters and buffers that come, go or are replaced while a loop is under way."""

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize, prune

from unisono.engine.step.model_guard import Structure


def make():
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Linear(3, 2, bias=False))
    model.register_buffer("seen", torch.zeros(()))
    model[1].register_module("later", None)
    return model


def fill_a_layer(model):
    model[1].later = nn.Linear(2, 2)


def fill_a_bias(model):
    model[2].bias = nn.Parameter(torch.zeros(2))


def move_a_buffer(model):
    del model.seen
    model[0].register_buffer("seen", torch.zeros(()))


def replace_a_weight(model):
    model[0].weight = nn.Parameter(model[0].weight.detach() / 2)


def replace_a_layer(model):
    model[0] = nn.Linear(3, 3)


def add_a_layer_in_two_steps(model):
    model.more = nn.Sequential()
    model.check()
    model.more.append(nn.Linear(2, 2))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda model: model.append(nn.Linear(2, 2)), r"`3\.weight` has been added"),
        (lambda model: model.register_buffer("mean", torch.zeros(3)), "`mean` has been added"),
        (lambda model: model.pop(2), r"`2\.weight` has been removed"),
        (lambda model: delattr(model, "seen"), "`seen` has been removed"),
        (fill_a_layer, r"`1\.later\.weight` has been added"),
        (fill_a_bias, r"`2\.bias` has been added"),
        (move_a_buffer, r"`0\.seen` has been added"),
        (replace_a_weight, r"`0\.weight` has been replaced"),
        (replace_a_layer, r"`0\.weight` has been replaced"),
        (add_a_layer_in_two_steps, r"`more\.0\.weight` has been added"),
    ],
)
def test_a_change_is_named(change, words):
    model = make()
    model.check = Structure(model).check
    with pytest.raises(RuntimeError, match=f"must keep its layers.*{words}.*run the model once"):
        change(model)
        model.check()


def replace_a_buffer(model):
    model.seen = model.seen + 1


def cache_layers_without_tensors(model):
    model.activation = nn.ReLU()
    model.check()
    model.activation = nn.Identity()
    model.check()
    del model.activation


def name_a_layer_again(model):
    model.newest = model[2]


def functional_call(model):
    halves = {name: p.detach() / 2 for name, p in model.named_parameters()}
    torch.func.functional_call(model, halves, torch.randn(4, 3))


@pytest.mark.parametrize(
    "change",
    [
        lambda model: model(torch.randn(4, 3)),
        replace_a_buffer,
        cache_layers_without_tensors,
        name_a_layer_again,
        functional_call,
    ],
)
def test_what_changes_nothing_is_let_through(change):
    model = make()
    model.check = Structure(model).check
    change(model)
    model.check()


def test_evaluation_between_two_steps_may_make_buffers_but_no_layers():
    model = make()
    structure = Structure(model)
    model.register_buffer("mask", torch.ones(3))
    structure.begin()
    structure.check()
    model.more = nn.Linear(2, 2)
    structure.begin()
    with pytest.raises(RuntimeError, match=r"`more\.weight` has been added"):
        structure.check()


def recomputed_in_forward(model):
    parametrizations.spectral_norm(model[0])
    parametrizations.weight_norm(model[2])
    return model


def recomputed_by_hooks(model):
    nn.utils.spectral_norm(model[0])
    prune.random_unstructured(model[2], "weight", 0.5)
    return model


@pytest.mark.parametrize("wrap", [recomputed_in_forward, recomputed_by_hooks, torch.jit.script])
@pytest.mark.filterwarnings("ignore")
def test_weights_that_are_computed_in_each_pass_are_let_through(wrap):
    model = wrap(make())
    structure = Structure(model)
    with parametrize.cached():
        model(torch.randn(4, 3)).sum().backward()
        structure.check()
    structure.check()
