"""Which optimizers can be cut into pieces, which see whole parameters, which cannot run here.

Code for a whole run (exchanges, checkpoints, digests) has one optimizer, which may combine several.
Updates handle each optimizer separately; see :func:`optimizers_of`.
"""

from __future__ import annotations

import copy
import functools
import inspect
import operator
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from typing import Any, final

import torch
from torch import optim
from torch.optim import Optimizer

from unisono.programs.holders import HOOKS_OF_OPTIMIZERS
from unisono.runtime.device import HOST

ELEMENTWISE: tuple[type[optim.Optimizer], ...] = (
    optim.Adam,
    optim.AdamW,
    optim.SGD,
    optim.RMSprop,
    optim.Adagrad,
    optim.Adadelta,
    optim.Adamax,
    optim.NAdam,
    optim.RAdam,
    optim.ASGD,
    optim.Rprop,
)
_MODULE = operator.attrgetter("__module__")
_WRAPPING = (optim.Optimizer.__module__, optim.lr_scheduler.LRScheduler.__module__)


def is_elementwise(optimizer: optim.Optimizer) -> bool:
    """Return whether each element's update depends on that element alone.

    Only torch's own classes qualify: a subclass may use whole parameters. Fused SGD computes the
    last elements of a range differently, and with several threads every thread has such a range;
    then parameters stay whole. So they do if other code runs around ``step()``, which may for
    example clip gradients by their norm. Several optimizers must all qualify.
    """
    return all(map(_is_elementwise, optimizers_of(optimizer).values()))


def _is_elementwise(optimizer: optim.Optimizer) -> bool:
    if type(optimizer) not in ELEMENTWISE or is_surrounded(optimizer):
        return False
    fused = any(group.get("fused") for group in optimizer.param_groups)
    return not (type(optimizer) is optim.SGD and fused and torch.get_num_threads() > 1)


def is_surrounded(optimizer: optim.Optimizer) -> bool:
    """Return whether other code runs before, after or around ``step()``.

    Such code is a hook, or a replaced ``step`` of an optimizer or its class. The wrapper of a
    learning-rate schedule does not count: it only records that the optimizer has stepped.
    """
    return bool(
        optimizer._optimizer_step_pre_hooks
        or optimizer._optimizer_step_post_hooks
        or any(HOOKS_OF_OPTIMIZERS.values())
        # AdamW has Adam's `step`.
        or _module_of(_unwrapped_step(optimizer)) not in map(_MODULE, type(optimizer).__mro__)
    )


def needs_closure(optimizer: optim.Optimizer) -> bool:
    """Return whether ``step()`` requires a closure."""
    closures = [
        inspect.signature(type(single).step).parameters.get("closure")
        for single in optimizers_of(optimizer).values()
    ]
    return any(c is not None and c.default is inspect.Parameter.empty for c in closures)


def bare_step(optimizer: optim.Optimizer) -> Callable[[], object]:
    """Return ``step()`` of an element-wise optimizer without torch's wrappers.

    torch wraps it for its profiler, hooks and compiler, which for a small model takes as long as
    the update itself.
    """
    return functools.partial(_unwrapped_step(optimizer), optimizer)


def _unwrapped_step(optimizer: optim.Optimizer) -> Any:
    """Return ``step`` without the wrappers of torch and its schedules; others stay."""
    step: Any = vars(optimizer).get("step", type(optimizer).step)
    while _module_of(step) in _WRAPPING and hasattr(step, "__wrapped__"):
        step = step.__wrapped__
    return step


def _module_of(function: Any) -> str:
    """Return the module in which a function was written, even if a wrapper has copied its name."""
    try:
        return str(function.__globals__["__name__"])
    except (AttributeError, KeyError):
        return ""


def check_optimizer(optimizer: optim.Optimizer, *, on_host: bool) -> None:
    """Raise an error, before any training, for what cannot give the same bits on all workers."""
    given: object = optimizer
    if not isinstance(given, optim.Optimizer):
        seen, kind = f"is of type {type(given).__name__}", "torch.optim.Adam"
        if isinstance(given, type):
            seen, kind = f"is the class {given.__name__}", f"torch.optim.{given.__name__}"
        raise TypeError(
            f"`optimizer` must be a torch.optim.Optimizer, but {seen}: pass "
            f"`{kind}(model.parameters())`, for example."
        )
    for single in optimizers_of(optimizer).values():
        _check_one(single, on_host=on_host)


def _check_one(optimizer: optim.Optimizer, *, on_host: bool) -> None:
    name = type(optimizer).__name__
    if isinstance(optimizer, optim.SparseAdam):
        raise ValueError(
            f"gradients must be dense, but {name} takes sparse ones alone: make the embeddings "
            f"with `sparse=False` and use Adam, which also moves rows that a batch lacks."
        )
    for group in optimizer.param_groups:
        if group.get("differentiable"):
            raise ValueError(f"`differentiable` must be off, but is on for {name}: leave it out.")
        if group.get("capturable") and on_host:
            raise ValueError(
                f"`capturable` must be off on CPU workers, but is on for {name}: leave it out."
            )
        halves = {one.dtype for one in group["params"]} & {torch.bfloat16, torch.float16}
        if not (isinstance(optimizer, optim.SGD) and group.get("fused") and group.get("momentum")):
            continue
        for dtype in halves:  # torch 2.13's kernel leaves garbage at the end of their momentum
            raise ValueError(
                f"`fused` must be off for SGD with momentum on {dtype} parameters, as torch's "
                f"kernel computes the last of their elements from memory that nobody has written, "
                f"but is on: leave it out."
            )


def state_like(
    optimizer: optim.Optimizer, group: dict[str, Any], dtype: torch.dtype
) -> dict[str, torch.Tensor]:
    """Return example tensors of the state that an element-wise optimizer keeps for a parameter.

    A copy of the optimizer takes one step on a parameter of four elements; state tensors that are
    like the parameter have four elements too, in contrast to scalars.
    """
    optimizers = optimizers_of(optimizer).values()
    optimizer = next(m for m in optimizers if any(one is group for one in m.param_groups))
    parameter = torch.nn.Parameter(torch.zeros(4, dtype=dtype, device=HOST))
    parameter.grad = torch.zeros_like(parameter)
    probe = copy.copy(optimizer)
    probe.param_groups = [{**group, "params": [parameter]}]
    probe.state = defaultdict(dict)
    if isinstance(optimizer, optim.Adagrad):
        count = torch.zeros((), device=HOST)
        probe.state[parameter] = {"step": count, "sum": torch.zeros_like(parameter)}
    probe.step()
    state = probe.state[parameter]
    return {key: value for key, value in state.items() if isinstance(value, torch.Tensor)}


@final
class SeveralOptimizers(Optimizer):
    """The optimizers of one run, by name; no two update the same parameter."""

    def __init__(self, optimizers: Mapping[str, Optimizer]) -> None:
        self.optimizers = dict(optimizers)  # torch's own attributes are each one's
        self._state = _States(self.optimizers)

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """The groups of all optimizers, one optimizer after another."""
        return [group for single in self.optimizers.values() for group in single.param_groups]

    @property
    def state(self) -> MutableMapping[Any, Any]:  # type: ignore[override]
        """The state of all optimizers by parameter; other state is under ``NAME.KEY``."""
        return self._state

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Raise RuntimeError: each optimizer takes its steps separately."""
        raise RuntimeError("leave the steps of a run's optimizers to the run.")


class _States(MutableMapping[Any, Any]):
    """The state of several optimizers; each entry is stored by the optimizer that it belongs to."""

    def __init__(self, optimizers: Mapping[str, Optimizer]) -> None:
        self._optimizers, self._owners = optimizers, dict[torch.Tensor, Optimizer]()

    def __getitem__(self, key: Any) -> Any:
        state, own = self._at(key)
        if own not in state:  # torch's would make an entry
            raise KeyError(key)
        return state[own]

    def __setitem__(self, key: Any, value: Any) -> None:
        state, own = self._at(key)
        state[own] = value

    def __delitem__(self, key: Any) -> None:
        state, own = self._at(key)
        del state[own]

    def __iter__(self) -> Iterator[Any]:
        for name, single in self._optimizers.items():
            for key in single.state:
                yield key if isinstance(key, torch.Tensor) else f"{name}.{key}"

    def __len__(self) -> int:
        return sum(len(single.state) for single in self._optimizers.values())

    def _at(self, key: Any) -> tuple[Any, Any]:
        if not isinstance(key, torch.Tensor):
            name, _, own = str(key).partition(".")
            return self._optimizers[name].state, own
        if key not in self._owners:  # groups may be added between two loops
            self._owners = {
                parameter: single
                for single in self._optimizers.values()
                for group in single.param_groups
                for parameter in group["params"]
            }
        return self._owners[key].state, key


def optimizers_of(optimizer: Optimizer) -> dict[str, Optimizer]:
    """Return a run's optimizers by name; a single one has the name ""."""
    return optimizer.optimizers if isinstance(optimizer, SeveralOptimizers) else {"": optimizer}


def kind_of(optimizer: Optimizer) -> str:
    """Return the class name of an optimizer, or those of several."""
    return ", ".join(
        f"{name}: {type(single).__qualname__}" if name else type(single).__qualname__
        for name, single in optimizers_of(optimizer).items()
    )
