"""Which operation does torch refuse as it has no deterministic form, and where is it called?

torch names its kernel alone. In a forward pass the traceback has the module and the line. A
backward pass has no such frames: there a second look at the shard has them (``failing_step.py``).
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from traceback import walk_tb

from torch import nn

from unisono.cublas import WORKSPACE_VARIABLE
from unisono.errors import NondeterministicError
from unisono.notices import shown
from unisono.step.second_look import CallSite, innermost

_REFUSED = re.compile(r"(\S+) does not have a deterministic implementation")
# What torch's documentation lists as deterministic.
_INSTEAD = {
    "put_": "`index_put_`",
    "bincount": "`torch.zeros(n).index_add_(0, indices, weights)`",
    "cumsum": "a product with a triangular matrix of ones",
    "reflection_pad": '`mode="replicate"`',
    "upsample": '`mode="nearest"`',
}


def is_refusal(error: BaseException) -> bool:
    """Tell whether torch has refused an operation as it has no deterministic form."""
    if not isinstance(error, RuntimeError) or isinstance(error, NondeterministicError):
        return False
    return _REFUSED.search(str(error)) is not None or WORKSPACE_VARIABLE in str(error)


@contextmanager
def refusals_explained(model: nn.Module, is_needed: bool) -> Iterator[None]:
    """Raise :class:`NondeterministicError` for what torch refuses in forward passes in a block.

    Args:
        model: which computes.
        is_needed: whether torch is to choose deterministic kernels and refuse what has none.
    """
    try:
        yield
    except RuntimeError as error:
        if not (is_needed and is_refusal(error)):
            raise
        raise refused_in_forward(error, model) from error


def refused_in_forward(error: BaseException, model: nn.Module) -> NondeterministicError:
    """Say of a refused operation in which module of a model its traceback ends."""
    names = {id(module): name for name, module in model.named_modules()}
    frames = list(walk_tb(error.__traceback__))
    place = innermost([(frame.f_code.co_filename, line) for frame, line in frames])
    for frame, _ in reversed(frames):
        module = frame.f_locals.get("self")
        if id(module) in names:
            place = place._replace(module=names[id(module)], kind=type(module).__name__)
            break
    return _explained(error, f"{place}", place)


def refused_in_backward(error: BaseException, place: CallSite) -> NondeterministicError:
    """Say it of one in a backward pass: where the node was made that torch refuses to execute."""
    return _explained(error, f"the backward pass of {place}", place)


def _explained(error: BaseException, where: str, place: CallSite) -> NondeterministicError:
    refused = _REFUSED.search(str(error))
    if refused is None:
        return NondeterministicError(
            f"`{WORKSPACE_VARIABLE}` must be `:4096:8` or `:16:8`, or products of matrices have no "
            f"deterministic form, but is {os.environ.get(WORKSPACE_VARIABLE)!r}: set it before "
            f"the program starts, or leave it unset."
        )
    operation = shown(refused[1])
    kernel = operation.lstrip("_")
    instead = next((way for name, way in _INSTEAD.items() if kernel.startswith(name)), None)
    way_out = "compute it by other operations" if instead is None else f"write {instead}"
    return NondeterministicError(
        f"every operation must have a deterministic form on this device, but `{operation}` has "
        f"none: it is called in {where}. Instead, {way_out}, or pass `exact=False`, which allows "
        f"it; results may then differ from one run to the next.",
        operation=operation,
        module=place.module,
        file=place.file,
        line=place.line,
    )
