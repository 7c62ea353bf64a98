"""Values of many kinds, and how a program exchanges or changes them between steps.

Each kind has three functions: one makes its first value; one returns the next value, made from that
before, or changes that in place and returns it; one returns a number that tells values apart.
"""

from __future__ import annotations

import argparse
import array
import collections
import configparser
import copy
import dataclasses
import datetime
import decimal
import enum
import fractions
import functools
import heapq
import io
import itertools
import operator
import pathlib
import queue
import random
import threading
import types
import uuid
import zoneinfo
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

Kind = tuple[Callable[[], Any], Callable[[Any], Any], Callable[[Any], float]]


@dataclasses.dataclass
class Box:
    a: float = 1.0


@dataclasses.dataclass
class Boxed(Box):
    pass


@dataclasses.dataclass(frozen=True, slots=True)
class Frozen:
    a: float = 1.0


class Slotted:
    __slots__ = ("a",)

    def __init__(self, a: float = 1.0) -> None:
        self.a = a


class Pair(collections.namedtuple("Pair", "a b")):
    pass


class Grows(dict):
    pass


class Mode(enum.IntEnum):
    A = 1
    B = 2


class Plain(np.ndarray):
    pass


class Marked(torch.Tensor):
    pass


def marked() -> Any:
    def inner() -> None:
        pass

    inner.a = 1.0
    return inner


REPLACED: dict[str, Kind] = {
    "number": (lambda: 1.0, lambda v: v * 0.99, float),
    "np_float": (lambda: np.float32(1), lambda v: np.float32(v * 0.99), float),
    "long": (
        lambda: np.full(3, np.longdouble(1) / 3),
        lambda v: np.where(True, v * np.longdouble(0.99), v),
        lambda v: float(v[0]),
    ),
    "big": (
        lambda: np.array([1.0], ">f8"),
        lambda v: (v * 0.99).astype(">f8"),
        lambda v: float(v[0]),
    ),
    "masked": (
        lambda: np.ma.array([1.0, 2.0], mask=[0, 1]),
        lambda v: v * 0.99,
        lambda v: float(v.sum()),
    ),
    "records": (
        lambda: np.ones(2, [("a", "f4"), ("b", "i8")]),
        lambda v: np.array([(v["a"][0] * 0.99, 3), (1, 2)], v.dtype),
        lambda v: float(v["a"][0]),
    ),
    "objects": (
        lambda: np.array([1.0, None], object),
        lambda v: np.array([v[0] * 0.99, []], object),
        lambda v: float(v[0]),
    ),
    "texts": (
        lambda: np.array(["a"], np.dtypes.StringDType()),
        lambda v: v + "a",
        lambda v: len(v[0]) / 9,
    ),
    "plain": (lambda: np.ones(2).view(Plain), lambda v: v * 0.99, lambda v: float(v[0])),
    "tensor": (lambda: torch.ones(2), lambda v: v * 0.99, lambda v: float(v[0])),
    "marked": (
        lambda: torch.ones(2).as_subclass(Marked),
        lambda v: v * 0.99,
        lambda v: float(v[0]),
    ),
    "conj": (
        lambda: torch.tensor([1 + 1j]).conj(),
        lambda v: (v * 0.99).conj(),
        lambda v: float(v.imag[0]) + 2,
    ),
    "half": (
        lambda: torch.ones(2, dtype=torch.bfloat16),
        lambda v: v * 0.98,
        lambda v: float(v[0]),
    ),
    "coo": (
        lambda: torch.eye(2).to_sparse(),
        lambda v: v * 0.99,
        lambda v: float(v.to_dense()[0, 0]),
    ),
    "parameter": (
        lambda: nn.Parameter(torch.ones(2)),
        lambda v: nn.Parameter(v.detach() * 0.99),
        lambda v: float(v[0]),
    ),
    "moduledict": (
        lambda: {"l": nn.Linear(2, 1)},
        lambda v: {"l": copy.deepcopy(v["l"])},
        lambda v: 1.0,
    ),
    "space": (
        lambda: types.SimpleNamespace(a=1.0),
        lambda v: types.SimpleNamespace(a=v.a * 0.99),
        lambda v: v.a,
    ),
    "box": (Box, lambda v: Box(v.a * 0.99), lambda v: v.a),
    "frozen": (Frozen, lambda v: Frozen(v.a * 0.99), lambda v: v.a),
    "slotted": (Slotted, lambda v: Slotted(v.a * 0.99), lambda v: v.a),
    "pair": (
        lambda: Pair(1.0, [1]),
        lambda v: Pair(v.a * 0.99, [*v.b, 1]),
        lambda v: v.a + len(v.b) / 99,
    ),
    "grows": (lambda: Grows(a=1.0), lambda v: Grows(a=v["a"] * 0.99), lambda v: v["a"]),
    "mode": (lambda: Mode.A, lambda v: Mode(3 - v), int),
    "most": (
        lambda: torch.max(torch.ones(2, 3), 1),
        lambda v: torch.max(v.values[:, None] * torch.tensor([0.1, 0.98]), 1),
        lambda v: float(v.values[0]),
    ),
    "decimal": (lambda: decimal.Decimal(1), lambda v: v * decimal.Decimal("0.99"), float),
    "fraction": (lambda: fractions.Fraction(1), lambda v: v * fractions.Fraction(99, 100), float),
    "day": (
        lambda: datetime.datetime(2020, 1, 1, tzinfo=zoneinfo.ZoneInfo("UTC")),
        lambda v: v + datetime.timedelta(hours=1),
        lambda v: v.hour / 24,
    ),
    "path": (lambda: pathlib.Path("a"), lambda v: v / "b", lambda v: len(v.parts) / 99),
    "uuid": (
        lambda: uuid.uuid5(uuid.NAMESPACE_DNS, "a"),
        lambda v: uuid.uuid5(v, "b"),
        lambda v: v.int % 97 / 97,
    ),
    "deque": (
        lambda: collections.deque([1.0], 3),
        lambda v: collections.deque([*v, v[-1] * 0.99], 3),
        lambda v: v[-1],
    ),
    "counter": (
        lambda: collections.Counter(a=1),
        lambda v: v + collections.Counter(a=1),
        lambda v: v["a"] / 99,
    ),
    "chain": (
        lambda: collections.ChainMap({"a": 1.0}),
        lambda v: v.new_child({"a": v["a"] * 0.99}),
        lambda v: v["a"],
    ),
    "default": (
        lambda: collections.defaultdict(list),
        lambda v: collections.defaultdict(list, {**v, len(v): [1]}),
        lambda v: len(v) / 99,
    ),
    "text": (
        lambda: io.StringIO("a"),
        lambda v: io.StringIO(v.getvalue() + "a"),
        lambda v: len(v.getvalue()) / 99,
    ),
    "bytes": (lambda: b"a", lambda v: v + b"a", lambda v: len(v) / 99),
    "bytearray": (lambda: bytearray(b"a"), lambda v: v + b"a", lambda v: len(v) / 99),
    "array": (
        lambda: array.array("d", [1.0]),
        lambda v: array.array("d", [v[0] * 0.99]),
        lambda v: v[0],
    ),
    "set": (lambda: {1}, lambda v: v | {len(v) + 1}, lambda v: len(v) / 99),
    "frozenset": (lambda: frozenset([1]), lambda v: v | {len(v) + 1}, lambda v: len(v) / 99),
    "range": (lambda: range(1), lambda v: range(len(v) + 1), lambda v: len(v) / 99),
    "slice": (lambda: slice(1), lambda v: slice(v.stop + 1), lambda v: v.stop / 99),
    "count": (
        lambda: itertools.count(),
        lambda v: itertools.count(next(v) + 1),
        lambda v: int(repr(v)[6:-1]) / 99,
    ),
    "partial": (
        lambda: functools.partial(abs, 1.0),
        lambda v: functools.partial(abs, v() * 0.99),
        lambda v: v(),
    ),
    "closure": (
        lambda: (lambda a: lambda: a)(1.0),
        lambda v: (lambda a: lambda: a)(v() * 0.99),
        lambda v: v(),
    ),
    "getter": (
        lambda: operator.itemgetter(0),
        lambda v: operator.itemgetter((v([*range(99)]) + 1) % 9),
        lambda v: v([*range(99)]) / 99,
    ),
    "dtype": (
        lambda: torch.float32,
        lambda v: {torch.float32: torch.float16, torch.float16: torch.float32}[v],
        lambda v: v.itemsize / 9,
    ),
    "npdtype": (
        lambda: np.dtype("f4"),
        lambda v: np.dtype([("a", "f4")]) if v.names is None else np.dtype("f4"),
        lambda v: 0.5 if v.names else 0.7,
    ),
    "size": (lambda: torch.Size([1]), lambda v: torch.Size([v[0] + 1]), lambda v: v[0] / 99),
    "complex": (lambda: 1 + 1j, lambda v: v * 0.99, lambda v: v.real),
    "none": (lambda: None, lambda v: None if v else 1.0, lambda v: 0.5 if v is None else 0.6),
    "kind": (lambda: Box, lambda v: Frozen if v is Box else Box, lambda v: len(v.__name__) / 9),
    "function": (lambda: max, lambda v: min if v is max else max, lambda v: v(1, 2) / 9),
    "torchf": (
        lambda: F.relu,
        lambda v: F.gelu if v is F.relu else F.relu,
        lambda v: float(v(torch.tensor(-0.5))) + 1,
    ),
    "layer": (
        lambda: nn.ReLU(),
        lambda v: nn.Tanh() if type(v) is nn.ReLU else nn.ReLU(),
        lambda v: float(v(torch.tensor(2.0))),
    ),
    "wrapped": (
        lambda: {"a": [(1.0, {"b": 2.0})]},
        lambda v: {"a": [(v["a"][0][0] * 0.99, {"b": 1.0})]},
        lambda v: v["a"][0][0],
    ),
}
"""Values that are exchanged."""

CHANGED: dict[str, Kind] = {
    "long": (
        lambda: np.full(3, np.longdouble(1) / 3),
        lambda v: v.__imul__(np.longdouble(0.99)),
        lambda v: float(v[0]),
    ),
    "big": (lambda: np.array([1.0], ">f8"), lambda v: v.__imul__(0.99), lambda v: float(v[0])),
    "masked": (
        lambda: np.ma.array([1.0, 2.0], mask=[0, 0]),
        lambda v: (
            (v.__setitem__(0, v[0] * 0.99), v.__setattr__("mask", [0, int(v[0] > 0.9)]))[0] or v
        ),
        lambda v: float(v.sum()),
    ),
    "records": (
        lambda: np.ones(2, [("a", "f4"), ("b", "i8")]),
        lambda v: v["a"].__imul__(0.99) is None or v,
        lambda v: float(v["a"][0]),
    ),
    "objects": (
        lambda: np.array([1.0, [1]], object),
        lambda v: (v.__setitem__(0, v[0] * 0.99), v[1].append(1))[0] or v,
        lambda v: float(v[0]) + len(v[1]) / 99,
    ),
    "texts": (
        lambda: np.array(["a"], np.dtypes.StringDType()),
        lambda v: v.__setitem__(0, v[0] + "a") or v,
        lambda v: len(v[0]) / 9,
    ),
    "plain": (lambda: np.ones(2).view(Plain), lambda v: v.__imul__(0.99), lambda v: float(v[0])),
    "tensor": (lambda: torch.ones(2), lambda v: v.mul_(0.99), lambda v: float(v[0])),
    "dataput": (
        lambda: torch.ones(2),
        lambda v: v.__setattr__("data", torch.cat([v.data, v.data[:1] * 0.99])) or v,
        lambda v: float(v.sum()) / 30,
    ),
    "marked": (
        lambda: torch.ones(2).as_subclass(Marked),
        lambda v: v.mul_(0.99),
        lambda v: float(v[0]),
    ),
    "attribute": (
        lambda: torch.ones(2),
        lambda v: v.__setattr__("scale", getattr(v, "scale", 1.0) * 0.99) or v,
        lambda v: getattr(v, "scale", 1.0),
    ),
    "gradient": (
        lambda: nn.Parameter(torch.ones(2)),
        lambda v: (
            v.__setattr__(
                "grad", torch.ones(2) * 0.99 * (1.0 if v.grad is None else float(v.grad[0]))
            )
            or v
        ),
        lambda v: 1.0 if v.grad is None else float(v.grad[0]),
    ),
    "conj": (
        lambda: torch.tensor([1 + 1j]).conj(),
        lambda v: v.mul_(0.99),
        lambda v: float(v.imag[0]) + 2,
    ),
    "half": (
        lambda: torch.ones(2, dtype=torch.bfloat16),
        lambda v: v.mul_(0.98),
        lambda v: float(v[0]),
    ),
    "coo": (
        lambda: torch.eye(2).to_sparse(),
        lambda v: v.mul_(0.99),
        lambda v: float(v.to_dense()[0, 0]),
    ),
    "parameter": (
        lambda: nn.Parameter(torch.ones(2)),
        lambda v: v.data.mul_(0.99) is None or v,
        lambda v: float(v[0]),
    ),
    "frozenp": (
        lambda: nn.Parameter(torch.ones(2)),
        lambda v: v.requires_grad_(not v.requires_grad),
        lambda v: 0.5 + v.requires_grad,
    ),
    "layer": (
        lambda: nn.Linear(2, 1),
        lambda v: v.weight.data.fill_(float(v.weight[0, 0]) * 0.99) is None or v,
        lambda v: float(v.weight[0, 0]) + 1,
    ),
    "layers": (
        lambda: nn.Sequential(nn.Linear(2, 1)),
        lambda v: v.append(nn.ReLU()),
        lambda v: len(v) / 30,
    ),
    "hooked": (
        lambda: nn.Linear(1, 1),
        lambda v: v.register_forward_hook(lambda m, i, o: o * 0.99) is None or v,
        lambda v: len(v._forward_hooks) / 30,
    ),
    "trained": (
        lambda: nn.Dropout(),
        lambda v: v.train(not v.training),
        lambda v: 0.5 + v.training,
    ),
    "space": (
        lambda: types.SimpleNamespace(a=1.0),
        lambda v: v.__setattr__("a", v.a * 0.99) or v,
        lambda v: v.a,
    ),
    "box": (Box, lambda v: v.__setattr__("a", v.a * 0.99) or v, lambda v: v.a),
    "turned": (
        Box,
        lambda v: v.__setattr__("__class__", Boxed if type(v) is Box else Box) or v,
        lambda v: len(type(v).__name__) / 9,
    ),
    "slotted": (Slotted, lambda v: v.__setattr__("a", v.a * 0.99) or v, lambda v: v.a),
    "pair": (lambda: Pair(1.0, [1]), lambda v: v.b.append(1) or v, lambda v: v.a + len(v.b) / 99),
    "grows": (lambda: Grows(a=1.0), lambda v: v.update(a=v["a"] * 0.99) or v, lambda v: v["a"]),
    "deque": (
        lambda: collections.deque([1.0], 3),
        lambda v: v.append(v[-1] * 0.99) or v,
        lambda v: v[-1],
    ),
    "counter": (
        lambda: collections.Counter(a=1),
        lambda v: v.update("a") or v,
        lambda v: v["a"] / 99,
    ),
    "chain": (
        lambda: collections.ChainMap({"a": 1.0}),
        lambda v: v.maps.insert(0, {"a": v["a"] * 0.99}) or v,
        lambda v: v["a"],
    ),
    "default": (
        lambda: collections.defaultdict(list),
        lambda v: v[len(v)].append(1) or v,
        lambda v: len(v) / 99,
    ),
    "ordered": (
        lambda: collections.OrderedDict(a=1, b=2, c=3),
        lambda v: v.move_to_end(next(iter(v))) or v,
        lambda v: v[next(iter(v))],
    ),
    "text": (
        lambda: io.StringIO("a"),
        lambda v: v.write("b") and v,
        lambda v: len(v.getvalue()) / 99,
    ),
    "bytearray": (lambda: bytearray(b"a"), lambda v: v.append(1) or v, lambda v: len(v) / 99),
    "array": (
        lambda: array.array("d", [1.0]),
        lambda v: v.append(v[-1] * 0.99) or v,
        lambda v: v[-1],
    ),
    "set": (lambda: {1}, lambda v: v.add(len(v) + 1) or v, lambda v: len(v) / 99),
    "count": (
        lambda: itertools.count(),
        lambda v: next(v) is None or v,
        lambda v: int(repr(v)[6:-1]) / 99,
    ),
    "listiter": (
        lambda: iter([*range(99)]),
        lambda v: next(v) is None or v,
        lambda v: next(copy.copy(v)) / 99,
    ),
    "random": (
        lambda: random.Random(1),
        lambda v: v.random() is None or v,
        lambda v: copy.deepcopy(v).random(),
    ),
    "gen": (
        lambda: np.random.default_rng(1),
        lambda v: v.random() is None or v,
        lambda v: float(copy.deepcopy(v).random()),
    ),
    "tgen": (
        lambda: torch.Generator().manual_seed(1),
        lambda v: torch.rand(1, generator=v) is None or v,
        lambda v: int(v.get_state()[:99].sum()) % 97 / 97,
    ),
    "closure": (
        lambda: (lambda a: (lambda: a, lambda b: None))([1.0]),
        lambda v: v[0]().append(v[0]()[-1] * 0.99) or v,
        lambda v: v[0]()[-1],
    ),
    "function": (lambda: marked(), lambda v: v.__setattr__("a", v.a * 0.99) or v, lambda v: v.a),
    "wrapped": (
        lambda: {"a": [(1.0, {"b": 2.0})]},
        lambda v: v["a"][0][1].update(b=v["a"][0][1]["b"] * 0.99) or v,
        lambda v: v["a"][0][1]["b"],
    ),
    "heap": (
        lambda: [3, 4, 5],
        lambda v: heapq.heappushpop(v, 9 - v[0]) is None or v,
        lambda v: v[0] / 9,
    ),
    "exception": (
        lambda: ValueError(1.0),
        lambda v: v.__setattr__("a", getattr(v, "a", 1.0) * 0.99) or v,
        lambda v: getattr(v, "a", 1.0),
    ),
    "noted": (
        lambda: ValueError(1.0),
        lambda v: v.add_note("a") or v,
        lambda v: len(getattr(v, "__notes__", ())) / 30,
    ),
    "thread": (
        threading.local,
        lambda v: v.__setattr__("a", getattr(v, "a", 1.0) * 0.99) or v,
        lambda v: getattr(v, "a", 1.0),
    ),
    "event": (
        threading.Event,
        lambda v: (v.clear() if v.is_set() else v.set()) or v,
        lambda v: 0.5 + v.is_set(),
    ),
    "queue": (queue.Queue, lambda v: v.put(1) or v, lambda v: v.qsize() / 30),
    "average": (
        lambda: torch.optim.swa_utils.AveragedModel(nn.Linear(1, 1)),
        lambda v: v.update_parameters(nn.Linear(1, 1).requires_grad_(False)) or v,
        lambda v: int(v.n_averaged) / 30,
    ),
    "parser": (
        lambda: argparse.Namespace(a=1.0),
        lambda v: v.__setattr__("a", v.a * 0.99) or v,
        lambda v: v.a,
    ),
    "config": (
        configparser.ConfigParser,
        lambda v: v.read_dict({"s": {"a": str(float(v.get("s", "a", fallback="1")) * 0.99)}}) or v,
        lambda v: float(v.get("s", "a", fallback="1")),
    ),
    "bits": (
        lambda: np.random.PCG64(1),
        lambda v: v.random_raw() is None or v,
        lambda v: v.state["state"]["state"] % 97 / 97,
    ),
}
"""Values that are changed in place."""


class Values:
    """The values of all kinds but some."""

    def __init__(self, *without: str) -> None:
        replaced = {f"new_{name}": kind for name, kind in REPLACED.items()}
        changed = {f"same_{name}": kind for name, kind in CHANGED.items()}
        self.kinds = {n: kind for n, kind in (replaced | changed).items() if n not in without}

    def first(self) -> dict[str, Any]:
        return {name: make() for name, (make, _, _) in self.kinds.items()}

    def next(self, name: str, value: Any) -> Any:
        return self.kinds[name][1](value)

    def number(self, values: dict[str, Any]) -> float:
        """Return the mean of the numbers of all values."""
        return sum(self.kinds[name][2](value) for name, value in values.items()) / len(values)
