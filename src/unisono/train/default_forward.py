"""What `forward` is where a program does not say it: how a model is called with a batch.

Many models are called with the first part of a batch. Where that does not fit a model's signature,
the error says what to pass as `forward`, with the names that model and batch have.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from torch import nn

_SAID = "`forward` (in `fit`: `validate_forward`)"


def forward_inputs(model: nn.Module, batch: Any) -> Any:
    """Call the model with a batch, or with the first part of one that has several.

    Raises:
        TypeError: the model cannot be called so.
    """
    return _call(model, batch, _first(batch))


def outputs_and_targets(model: nn.Module, batch: Any) -> Any:
    """Call the model with the first part of a pair (inputs, targets); the second goes with it.

    Raises:
        TypeError: the batch is no pair, or the model cannot be called so.
    """
    _check_pair(model, batch)
    return _call(model, batch, batch[0], targets=True), batch[1]


def _first(batch: Any) -> Any:
    return batch[0] if isinstance(batch, (tuple, list)) else batch


def _check_pair(model: nn.Module, batch: Any) -> None:
    if not isinstance(batch, (tuple, list)) or len(batch) != 2:
        raise TypeError(
            f"a batch must be a pair (inputs, targets) for metrics to get (outputs, targets), but "
            f"is {_told(batch)}: say what they get with a function {_SAID}, such as "
            f"`{_suggestion(model, batch, targets=True)}`."
        )


def _call(model: nn.Module, batch: Any, given: Any, *, targets: bool = False) -> Any:
    try:
        return model(given)
    except (TypeError, AttributeError) as error:
        if _fits(model, given) and not isinstance(given, Mapping):
            raise
        raise TypeError(
            f"a batch must fit the model's `forward({', '.join(_parameters(model))})`, which was "
            f"called with ({type(given).__name__}) of {_told(batch)}, but: {error}. Say how the "
            f"model is called with a function {_SAID}, such as "
            f"`{_suggestion(model, batch, targets=targets)}`."
        ) from error


def _fits(model: nn.Module, given: Any) -> bool:
    try:
        inspect.signature(model.forward).bind(given)
    except TypeError:
        return False
    except ValueError:  # nobody knows
        pass
    return True


def _parameters(model: nn.Module) -> list[str]:
    try:
        return list(inspect.signature(model.forward).parameters)
    except (TypeError, ValueError):
        return []


def _told(batch: Any) -> str:
    if isinstance(batch, Mapping):
        return f"a {type(batch).__name__} of {list(batch)}"
    parts = f" of {len(batch)}" if isinstance(batch, (tuple, list)) else ""
    return f"a {type(batch).__name__}{parts}"


def _suggestion(model: nn.Module, batch: Any, *, targets: bool) -> str:
    """Write a function that fits, as far as names and numbers tell."""
    names, first = _parameters(model), ""
    if isinstance(batch, Mapping):
        taken = [name for name in names if name in batch] or list(batch)[:1]
        inputs = [f'batch["{name}"]' for name in taken]
        others = [name for name in batch if name not in taken]
        first = f'batch["{others[-1]}"]' if others else "…"
    else:
        num_parts = len(batch) if isinstance(batch, (tuple, list)) else 1
        num_inputs = max(1, min(len(names), num_parts - targets))
        inputs = [f"batch[{at}]" for at in range(num_inputs)]
        first = f"batch[{num_inputs}]"
    called = f"model({', '.join(inputs)})"
    return f"lambda model, batch: {f'({called}, {first})' if targets else called}"
