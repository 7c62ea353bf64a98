"""Is it a loss function that a trainer can call? Forms that people write are named.

A trainer calls ``loss(model, batch)``. A criterion takes outputs and targets, a function of three
takes a batch apart; both fail in the first step with words about something else.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from torch import nn
from torch.nn import functional

Loss = Callable[[nn.Module, Any], Any]

_CRITERIA = nn.modules.loss.__name__
_WANTED = "`loss` must be a function of (model, batch)"
_WITH_STATE = "`loss` must be a function of (model, batch, state) with `carry=True`"


def check_loss(loss: object, *, carry: bool = False) -> None:
    """Refuse what is no function of (model, batch); if they `carry`, of (model, batch, state).

    Raises:
        TypeError: it is something else; the message says what to write.
    """
    if not callable(loss):
        raise TypeError(
            f"{_WANTED}, but is of type {type(loss).__name__}: pass `lambda model, batch: …`, or a "
            f"function."
        )
    if isinstance(loss, nn.Module) and type(loss).__module__ == _CRITERIA:
        raise _of_outputs(f"`nn.{type(loss).__name__}`", "criterion")
    name = getattr(loss, "__name__", "")
    if name and getattr(functional, name, None) is loss:
        raise _of_outputs(f"`F.{name}`", f"F.{name}")
    if carry:
        _check_takes_state(loss)
    else:
        _check_number_of_arguments(loss)


def _of_outputs(what: str, call: str) -> TypeError:
    return TypeError(
        f"{_WANTED}, but is {what}, which takes outputs and targets: pass "
        f"`lambda model, batch: {call}(model(batch[0]), batch[1])`, where a batch is a pair "
        f"(inputs, targets)."
    )


def _check_number_of_arguments(loss: Callable[..., Any]) -> None:
    try:
        signature = inspect.signature(loss)
    except (TypeError, ValueError):  # some that are written in C have none
        return
    try:
        signature.bind(None, None)
    except TypeError:
        given = [name for name, p in signature.parameters.items() if p.default is p.empty]
        apart = ""
        if len(given) > 2:
            apart = (
                "; a batch comes as one: pass `lambda model, batch: loss(model, *batch)`, say, if "
                "batches have as many parts"
            )
        raise TypeError(
            f"{_WANTED}, but takes ({', '.join(signature.parameters)}){apart}."
        ) from None


def _check_takes_state(loss: Callable[..., Any]) -> None:
    try:
        inspect.signature(loss).bind(None, None, None)
    except ValueError:  # some that are written in C have none
        return
    except TypeError:
        names = ", ".join(inspect.signature(loss).parameters)
        raise TypeError(
            f"{_WITH_STATE}, but takes ({names}): take the state that it returned for the batch "
            f"before, None at first, and return (loss, state)."
        ) from None


def check_embed(embed: object, closure: bool | None, *, carry: bool = False) -> None:
    """Refuse what is no function of (model, batch), and what does not go with features.

    Raises:
        TypeError, ValueError: it does not fit; the message says what to write.
    """
    if not callable(embed):
        raise TypeError(
            f"`embed` must be a function of (model, batch) that gives features, but is of type "
            f"{type(embed).__name__}: pass `lambda model, batch: model(batch[0])`, say."
        )
    if closure:
        raise ValueError(
            "`closure` must be left out where `embed` is given: a loss over the whole batch is "
            "computed once a step."
        )
    if carry:
        raise ValueError(
            "`carry` must be left out where `embed` is given: each batch is embedded twice."
        )
