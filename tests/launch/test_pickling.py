"""What travels beside what cloudpickle knows, and what a worker's ``__main__`` holds."""

from __future__ import annotations

import functools
import sys
import types
from typing import Any

import pytest
import torch

import unisono
from unisono.runtime.launch.call import pack_call
from unisono.runtime.launch.pickling import dumps, load

SCRIPT = """
import dataclasses, functools, io, threading, torch

@dataclasses.dataclass
class Config:
    rate: float = 0.1

class Net(torch.nn.Linear):
    pass

class Called:
    def __call__(self, x=0):
        return save_net(x)

def save(value):
    torch.save(value, io.BytesIO())
    return 1

def save_net(x=0):
    return save(Net(1, 1))

def prepare(x=0):
    torch.backends.cudnn.deterministic = True
    torch.backends.mkldnn.enabled = False
    return 1

@functools.lru_cache(maxsize=3)
def fibonacci(n):
    return n if n < 2 else fibonacci(n - 1) + fibonacci(n - 2)

def cached(x=0):
    return save(fibonacci) and fibonacci(x)
"""


@pytest.fixture(scope="module")
def script() -> dict[str, Any]:
    """The globals of a script, or of a notebook."""
    names: dict[str, Any] = {"__name__": "__main__"}
    exec(SCRIPT, names)
    return names


@pytest.mark.slow
@pytest.mark.parametrize(
    "make",
    [
        lambda script: (script["save"], script["Config"]()),
        lambda script: (functools.partial(script["save_net"], 1),),
        lambda script: (torch.no_grad()(script["save_net"]),),
        lambda script: (script["Called"](),),
        lambda script: (script["prepare"],),
        lambda script: (script["cached"], 1),
        lambda script: (script["fibonacci"], 1),
    ],
)
def test_what_a_script_defines_is_known_in_workers_by_its_name(script, make):
    assert unisono.launch(*make(script), workers=1) == [1]


def test_a_cache_travels_empty_and_with_its_size(script):
    script["fibonacci"](10)
    found = load(dumps(script["fibonacci"]))
    assert found is not script["fibonacci"]
    assert found.cache_parameters() == {"maxsize": 3, "typed": False}
    assert found.cache_info().currsize == 0
    assert found(10) == 55
    assert found.__wrapped__.__globals__["fibonacci"] is found
    assert load(dumps(torch.jit.script)) is torch.jit.script


def test_caches_without_a_name_travel(script):
    for called in (functools.partial(max, 3), script["Config"]):
        found = load(dumps(functools.cache(called)))
        assert (found.__wrapped__ is called) == (called is script["Config"])
        assert found(4) == called(4)
    script["Config"].__call__ = lambda self: 5
    assert load(dumps(functools.cache(script["Config"]())))() == 5
    del script["Config"].__call__


def test_caches_of_modules_travel_by_name():
    from unisono.data import fetch  # any module will do

    module = types.ModuleType("with_cache")
    exec("import functools\n@functools.cache\ndef f(): return 1", module.__dict__)
    sys.modules["with_cache"] = module
    try:
        assert load(dumps(module.f)) is module.f
    finally:
        del sys.modules["with_cache"]
    assert load(dumps(fetch)) is fetch


@pytest.mark.slow
def test_cached_properties_travel():
    class Data:
        def __init__(self) -> None:
            self.asked = 0

        @functools.cached_property
        def size(self):
            self.asked += 1
            return super().__sizeof__() and 3

    found = load(dumps(Data))
    data = Data()
    data = load(dumps(data))
    assert found is Data
    assert (data.size, data.size, data.asked) == (3, 3, 1)

    def ask():
        data = Data()
        return data.size, data.size, data.asked

    assert unisono.launch(ask, workers=1) == [(3, 3, 1)]


def test_the_class_of_the_present_is_known_and_not_an_older_one(script):
    main = sys.modules["__main__"]
    old = script["Config"]()
    new: dict[str, Any] = {"__name__": "__main__"}
    exec(SCRIPT, new)
    main.Config = new["Config"]
    try:
        packed = pack_call(print, (old, new["Config"](), new["save"]))
    finally:
        del main.Config
    call = load(packed)
    assert call["of_main"]["Config"] is type(call["args"][1])
