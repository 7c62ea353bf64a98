"""State dicts are taken with and without the prefix, and only where that is what they mean."""

from collections import OrderedDict

import pytest
import torch
import torch.nn as nn

import unisono
from unisono.distributed.module import is_without_prefix

A, B = torch.zeros(2), torch.zeros(3)


@pytest.mark.parametrize(
    ("given", "model", "answer"),
    [
        ({"w": A}, {"w": A}, True),
        ({"module.w": A}, {"w": A}, False),
        # a part of the model is called `module`
        ({"module.w": A}, {"module.w": A}, True),
        ({"module.module.w": A}, {"module.w": A}, False),
        ({"w": A, "module.w": A}, {"w": A, "module.w": A}, True),
        ({"module.w": A, "module.module.w": A}, {"w": A, "module.w": A}, False),
        # half of a dict, and it may mean both: as torch reads it, unless shapes say otherwise
        ({"module.w": A}, {"w": A, "module.w": A}, False),
        ({"module.w": B}, {"w": A, "module.w": B}, True),
        # nothing fits, or nothing is there
        ({"x": A}, {"w": A}, False),
        ({}, {"w": A}, False),
        # more than needed, and less
        ({"w": A, "x": A}, {"w": A, "v": A}, True),
        ({"module.w": A, "x": A}, {"w": A, "v": A}, False),
    ],
)
def test_what_a_dict_means_is_what_finds_more_of_the_model(given, model, answer):
    assert is_without_prefix(given, model) is answer


class Versioned(nn.Linear):
    """Remembers which version of itself it was loaded from."""

    _version = 7
    loaded = None

    def _load_from_state_dict(self, state_dict, prefix, metadata, *rest):
        self.loaded = metadata.get("version")
        super()._load_from_state_dict(state_dict, prefix, metadata, *rest)


def build():
    return nn.Sequential(OrderedDict(module=Versioned(2, 2), norm=nn.BatchNorm1d(2)))


def load_and_compare():
    source = build()
    nn.init.constant_(source.module.weight, 3.0)
    ddp = unisono.distributed.DistributedDataParallel(build())
    assert set(ddp.state_dict()) == {f"module.{name}" for name in source.state_dict()}
    plain = source.state_dict()
    wrapped = OrderedDict((f"module.{name}", value) for name, value in plain.items())

    for given in (plain, dict(plain), wrapped, dict(wrapped)):
        nn.init.zeros_(ddp.module.module.weight)
        assert not any(ddp.load_state_dict(given))
        assert torch.equal(ddp.module.module.weight, source.module.weight)
    ddp.load_state_dict(plain)
    assert ddp.module.module.loaded == 7
    assert list(plain) == list(source.state_dict())  # what was given is as it was

    missing, unexpected = ddp.load_state_dict({"module.weight": A.expand(2, 2), "x": A}, False)
    assert "module.norm.weight" in missing
    assert unexpected == ["module.x"]
    with pytest.raises(RuntimeError, match="Missing key"):
        ddp.load_state_dict({"module.weight": A.expand(2, 2)})
    with pytest.raises(TypeError, match="dict-like"):
        ddp.load_state_dict([1])

    outer = nn.Sequential(OrderedDict(net=ddp, head=nn.Linear(2, 2)))
    outer_plain = nn.Sequential(OrderedDict(net=source, head=nn.Linear(2, 2)))
    for given in (outer_plain.state_dict(), outer.state_dict()):
        nn.init.zeros_(ddp.module.module.weight)
        expected = given.get("net.module.module.weight", source.module.weight).clone()
        assert not any(outer.load_state_dict(given))
        assert torch.equal(ddp.module.module.weight, expected)


@pytest.mark.slow
def test_a_model_takes_both_forms_also_inside_of_another(on_ranks):
    on_ranks("unisono", 1, load_and_compare)
