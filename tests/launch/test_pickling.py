"""What travels beside what cloudpickle knows, and what a worker's ``__main__`` holds."""

from __future__ import annotations

import functools
import sys
from typing import Any

import pytest
import torch

import unisono
from unisono.launch.call import pack_call
from unisono.launch.pickling import load

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
"""


@pytest.fixture(scope="module")
def script() -> dict[str, Any]:
    """The globals of a script, or of a notebook."""
    names: dict[str, Any] = {"__name__": "__main__"}
    exec(SCRIPT, names)
    return names


@pytest.mark.parametrize(
    "make",
    [
        lambda script: (script["save"], script["Config"]()),
        lambda script: (functools.partial(script["save_net"], 1),),
        lambda script: (torch.no_grad()(script["save_net"]),),
        lambda script: (script["Called"](),),
    ],
)
def test_what_a_script_defines_is_known_in_workers_by_its_name(script, make):
    assert unisono.launch(*make(script), workers=1) == [1]


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
