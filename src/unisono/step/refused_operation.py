"""Which operation does torch refuse as it has no deterministic form, and where is it called?

torch names its kernel alone. In a forward pass the traceback has the module and the line. A
backward pass has no such frames, so the shard is computed once more, in a step that fails anyway,
and each node of the graph is noted with the module and the line that made it::

    backward ─► refused ─► the same batch once more ─► forward, noted ─► backward ─► refused, where

Passes that succeed cost nothing.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from traceback import walk_tb
from typing import Any

from torch import nn

from unisono.cublas import WORKSPACE_VARIABLE
from unisono.errors import NondeterministicError
from unisono.notices import shown
from unisono.step.graph_notes import CallSite, Notes, in_words, innermost, noted

_REFUSED = re.compile(r"(\S+) does not have a deterministic implementation")
# What torch's documentation lists as deterministic.
_INSTEAD = {
    "put_": "`index_put_`",
    "bincount": "`torch.zeros(n).index_add_(0, indices, weights)`",
    "cumsum": "a product with a triangular matrix of ones",
    "reflection_pad": '`mode="replicate"`',
    "upsample": '`mode="nearest"`',
}


class RefusedOperations:
    """Says of what torch refuses where it is called, for the steps of one loop. Final.

    Args:
        model: which computes.
        is_needed: whether torch is to choose deterministic kernels and refuse what has none.

    Attributes:
        model: which computes now.
        is_noting: whether a shard is computed once more, as its backward pass was refused.
    """

    def __init__(self, model: nn.Module, is_needed: bool) -> None:
        self.model, self._is_needed = model, is_needed
        self._stack = ExitStack()
        self._notes: Notes | None = None
        self._refused: BaseException | None = None  # in a backward pass
        self._place = CallSite()
        self.is_noting = False

    def begin_again(self, error: BaseException) -> bool:
        """Note the forward pass that comes next, if a backward pass was refused the first time.

        Returns:
            Whether the shard is to be computed once more.
        """
        if not self._is_needed or not _is_refusal(error):
            return False
        if self._refused is None:
            self._refused = error
            # A model may take no hooks; then the operation is named alone.
            with suppress(Exception):
                self._notes = self._stack.enter_context(noted(self.model))
                self.is_noting = True
            return self.is_noting
        if self._notes is not None:
            self._place = self._notes.last
        return False

    def watch(self, returned: Any) -> None:
        """Have the backward pass noted that comes next, of what a loss function has returned."""
        if self._notes is not None:
            self._notes.watch(returned)

    def close(self) -> None:
        """Note nothing any more."""
        self.is_noting = False
        self._stack.close()

    def explained(self, error: BaseException | None) -> NondeterministicError | None:
        """Say where an operation is called that torch has refused in a step.

        Args:
            error: what the step has raised, if anything.

        Returns:
            The error to raise instead; None if nothing was refused.
        """
        if self._refused is not None and (error is None or isinstance(error, Exception)):
            return _explained(self._refused, self._place, is_backward=True)
        if error is None or not self._is_needed or not _is_refusal(error):
            return None
        return _explained(error, _place_in(error, self.model), is_backward=False)


@contextmanager
def refusals_explained(model: nn.Module, is_needed: bool) -> Iterator[None]:
    """Raise :class:`NondeterministicError` for what torch refuses in forward passes in a block."""
    try:
        yield
    except RuntimeError as error:
        explained = RefusedOperations(model, is_needed).explained(error)
        if explained is None:
            raise
        raise explained from error


def _is_refusal(error: BaseException) -> bool:
    if not isinstance(error, RuntimeError) or isinstance(error, NondeterministicError):
        return False
    return _REFUSED.search(str(error)) is not None or WORKSPACE_VARIABLE in str(error)


def _place_in(error: BaseException, model: nn.Module) -> CallSite:
    """Find module and line in the traceback of an error of a forward pass."""
    names = {id(module): name for name, module in model.named_modules()}
    frames = list(walk_tb(error.__traceback__))
    place = innermost([(frame.f_code.co_filename, line) for frame, line in frames])
    for frame, _ in reversed(frames):
        module = frame.f_locals.get("self")
        if id(module) in names:
            return place._replace(module=names[id(module)], kind=type(module).__name__)
    return place


def _explained(
    error: BaseException, place: CallSite, *, is_backward: bool
) -> NondeterministicError:
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
        f"none: it is called in {'the backward pass of ' * is_backward}{in_words(place)}. Instead, "
        f"{way_out}, or pass `exact=False`, which allows it; results may then differ from one run "
        f"to the next.",
        operation=operation,
        module=place.module,
        file=place.file,
        line=place.line,
    )
