"""What travels beside what cloudpickle knows, and what a worker's ``__main__`` holds."""

from __future__ import annotations

import functools
import sys
from typing import Any

import numpy as np
import pytest
import torch

import unisono
from unisono.runtime.launch.call import pack_call
from unisono.runtime.launch.job import FUNCTION, Job
from unisono.runtime.launch.pickling import dumps, load
from unisono.runtime.world import world

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
        packed, _ = pack_call(print, (old, new["Config"](), new["save"]))
    finally:
        del main.Config
    call = load(packed)
    assert call["of_main"]["Config"] is type(call["args"][1])


def values(num_rows: int) -> list[Any]:
    """Arrays and tensors of all kinds; the first two tensors have one storage."""
    torch.manual_seed(0)
    whole = torch.arange(num_rows * 64.0).view(num_rows, 64)
    return [
        whole,
        whole.t()[3:5],
        whole.bfloat16(),
        torch.nn.Parameter(whole.clone()),
        torch.nn.Linear(64, num_rows),
        torch.zeros(0, 3),
        whole.to_sparse(),
        np.asfortranarray(whole.numpy()),
        whole.numpy()[::2],
    ]


def same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.nn.Module):
        pairs = zip(one.parameters(), other.parameters(), strict=True)
        return all(same(*pair) for pair in pairs)
    if isinstance(one, np.ndarray):
        return bool(np.array_equal(one, other) and other.flags.writeable)
    alike = (one.dtype, one.layout, one.requires_grad) == (
        other.dtype,
        other.layout,
        other.requires_grad,
    )
    strides = one.layout != torch.strided or one.stride() == other.stride()
    return alike and strides and torch.equal(one.to_dense(), other.to_dense())


def job_of(*args: Any) -> Job:
    payload, buffers = pack_call(len, args)
    return Job(
        kind=FUNCTION,
        target="len",
        payload=payload,
        buffers=buffers,
        environ={},
        num_workers=1,
        threads=1,
        restarts=0,
        replaces=False,
        stall_timeout_s=1.0,
        backend="gloo",
    )


@pytest.mark.parametrize("num_rows", [3, 10_000])  # in the pickle, beside it
def test_arrays_and_tensors_of_a_call_arrive_as_they_are(num_rows: int) -> None:
    given, job = values(num_rows), job_of(values(num_rows))
    assert len(job.buffers) == (0 if num_rows < 10 else 7)
    assert all(same(*pair) for pair in zip(given, load(dumps(given)), strict=True))
    fd = job.write()
    for _ in range(2):  # what one reader writes the next one does not see
        read = Job.read(fd)
        (found,) = load(read.payload, read.buffers)["args"]
        assert all(same(*pair) for pair in zip(given, found, strict=True))
        assert found[0].data_ptr() % 64 == 0
        found[0].zero_()
        assert not found[1].any()
        found[0].untyped_storage().resize_(0) if num_rows < 10 else None


def spoil(data: torch.Tensor) -> tuple[float, int]:
    """Give what was there, and how many bytes of it are this process's own; then write."""
    seen, held = float(data.sum()), 0
    if world().rank:
        data.zero_()
    with open("/proc/self/smaps") as file:
        is_job = False
        for line in file:
            is_job = "unisono-job" in line if "-" in line.split()[0] else is_job
            held += 1024 * int(line.split()[1]) if is_job and line.startswith("Anonymous") else 0
    unisono.distributed.init()
    torch.distributed.barrier()
    return seen, held


@pytest.mark.slow
def test_workers_share_the_data_of_a_call_until_they_write() -> None:
    data = torch.ones(1_000, 4_000)
    (first, not_held), (other, held) = unisono.launch(spoil, data, workers=2)
    assert first == other == data.sum()
    assert not_held < data.nbytes / 10
    assert held >= data.nbytes
