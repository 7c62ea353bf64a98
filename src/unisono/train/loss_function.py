"""Is it a loss function that a trainer can call? Forms that people write are named.

A trainer calls ``loss(model, batch)``. A criterion takes outputs and targets, a function of three
takes a batch apart; both fail in the first step with words about something else.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

from torch import nn
from torch.nn import functional

Loss = Callable[[nn.Module, Any], Any]

_CRITERIA = nn.modules.loss.__name__
_WANTED = "`loss` must be a function of (model, batch)"


def check_loss(loss: object) -> None:
    """Refuse what is no function of (model, batch).

    Raises:
        TypeError: it is something else; the message says what to write.
    """
    if isinstance(loss, nn.Module) and type(loss).__module__ == _CRITERIA:
        raise _of_outputs(f"`nn.{type(loss).__name__}`", "criterion")
    name = getattr(loss, "__name__", "")
    if name and getattr(functional, name, None) is loss:
        raise _of_outputs(f"`F.{name}`", f"F.{name}")
    check_function("loss", loss, ("model", "batch"), _apart(loss))


def check_forward(forward: object) -> None:
    """Refuse, with a TypeError, what is no such function, either, for outputs."""
    check_function("forward", forward, ("model", "batch"))


def check_function(name: str, function: object, arguments: Sequence[str], advice: str = "") -> None:
    """Refuse what cannot be called with so many arguments.

    Args:
        name: what it is passed as.
        function: is to be called.
        arguments: what it is called with, by name.
        advice: what to do if it takes others.

    Raises:
        TypeError: it is no function, or takes others.
    """
    wanted = f"`{name}` must be a function of ({', '.join(arguments)})"
    if not callable(function):
        raise TypeError(
            f"{wanted}, but is of type {type(function).__name__}: pass "
            f"`lambda {', '.join(arguments)}: …`, or a function."
        )
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # some that are written in C have none
        return
    try:
        signature.bind(*arguments)
    except TypeError:
        takes = ", ".join(signature.parameters)
        raise TypeError(f"{wanted}, but takes ({takes}){advice}.") from None


def _of_outputs(what: str, call: str) -> TypeError:
    return TypeError(
        f"{_WANTED}, but is {what}, which takes outputs and targets: pass "
        f"`lambda model, batch: {call}(model(batch[0]), batch[1])`, where a batch is a pair "
        f"(inputs, targets)."
    )


def _apart(loss: object) -> str:
    """Say what to write where a function takes a batch apart."""
    try:
        parameters = inspect.signature(loss).parameters  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return ""
    given = [name for name, p in parameters.items() if p.default is p.empty]
    if len(given) < 3:
        return ""
    return (
        "; a batch comes as one: pass `lambda model, batch: loss(model, *batch)`, say, if batches "
        "have as many parts"
    )


def check_embed(embed: object, closure: bool | None) -> None:
    """Refuse what is no function of (model, batch), and what does not go with features.

    Raises:
        TypeError, ValueError: it does not fit; the message says what to write.
    """
    check_function("embed", embed, ("model", "batch"))
    if closure:
        raise ValueError(
            "`closure` must be left out where `embed` is given: a loss over the whole batch is "
            "computed once a step."
        )
