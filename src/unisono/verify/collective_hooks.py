"""Watches torch.distributed: which results do ranks put together, and who says ``no_sync``?"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.nn.parallel import DistributedDataParallel

from unisono.verify.recorder import Recorder, observe, wrap

# Those that put together what ranks have; a broadcast or a barrier does not.
_SUMS = ("all_reduce", "reduce")
_GATHERS = (
    *("all_gather", "all_gather_into_tensor", "all_gather_single", "all_gather_object"),
    *("gather", "gather_object", "all_to_all", "all_to_all_single"),
)
_LISTS = {"all_gather": "tensor_list", "all_gather_object": "object_list"}  # their first argument
_VALUES_AT_MOST = 64


class CollectiveHooks:
    """Hooks around the functions of torch.distributed. Final."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._depth = 0

    def install(self) -> None:
        """Put the hooks in place."""
        if not dist.is_available():
            return
        for name in (*_SUMS, *_GATHERS):
            if hasattr(distributed_c10d, name):
                wrap(distributed_c10d, name, functools.partial(self._watch, name), dist)
        recorder = self._recorder
        observe(recorder, DistributedDataParallel, "no_sync", lambda _: recorder.write("no_sync"))

    def _watch(self, name: str, before: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self._depth or self._recorder.is_exact:
            return before(*args, **kwargs)
        given: list[float] = []
        with self._recorder.guarded():
            given = _values(name, args, kwargs)
        self._depth += 1
        try:
            result = before(*args, **kwargs)
        finally:
            self._depth -= 1
        with self._recorder.guarded():
            values = _values(name, args, kwargs)
            self._recorder.write("collective", name=name, given=given, values=values)
        return result


def _values(name: str, args: Any, kwargs: Any) -> list[float]:
    """Return the numbers that are added up, if they are few and known at once."""
    if name in _LISTS:
        return _numbers(args[0] if args else kwargs.get(_LISTS[name]))
    tensor = args[0] if args else kwargs.get("tensor")
    if name not in _SUMS or not isinstance(tensor, torch.Tensor):
        return []
    if tensor.numel() > _VALUES_AT_MOST or kwargs.get("async_op"):
        return []
    return tensor.detach().double().reshape(-1).tolist()


def _numbers(value: Any) -> list[float]:
    """List the numbers in what was gathered, in order, if they are few."""
    if isinstance(value, torch.Tensor):
        few = value.numel() <= _VALUES_AT_MOST
        return value.detach().double().reshape(-1).tolist() if few else []
    if isinstance(value, (list, tuple, dict)) and len(value) <= _VALUES_AT_MOST:
        inner = value.values() if isinstance(value, dict) else value
        return [number for one in inner for number in _numbers(one)]
    return [float(value)] if isinstance(value, (int, float)) else []
