"""Which operation does torch refuse as it has no deterministic form, and where is it called?

torch names its kernel alone. In a forward pass the traceback has the module and the line. A
backward pass has no such frames, so the shard is computed once more, in a step that fails anyway,
and each node of the graph is noted with the module and the line that made it::

    backward ─► refused ─► the same batch once more ─► forward, noted ─► backward ─► refused, where

Passes that succeed cost nothing.
"""

from __future__ import annotations

import bisect
import linecache
import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from traceback import walk_tb
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.autograd.graph import Node
from torch.utils._pytree import tree_leaves

from unisono.cublas import WORKSPACE_VARIABLE
from unisono.errors import NondeterministicError
from unisono.notices import shown

_REFUSED = re.compile(r"(\S+) does not have a deterministic implementation")
_FRAME = re.compile(r'\s*File "([^"\n]+)", line (\d+)')
_NOT_THE_PROGRAM = (
    f"{os.path.dirname(torch.__file__)}{os.sep}",
    f"{Path(__file__).resolve().parents[1]}{os.sep}",
    "<",
)
# What torch's documentation lists as deterministic.
_INSTEAD = {
    "put_": "`index_put_`",
    "bincount": "`torch.zeros(n).index_add_(0, indices, weights)`",
    "cumsum": "a product with a triangular matrix of ones",
    "reflection_pad": '`mode="replicate"`',
    "upsample": '`mode="nearest"`',
}


class CallSite(NamedTuple):
    """Where an operation is called.

    Attributes:
        module: the name of a module of the model; None where there is none.
        kind: the class of that module.
        file, line: of the program; ``""`` and 0 where it is not known.
    """

    module: str | None = None
    kind: str = ""
    file: str = ""
    line: int = 0


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
        self._notes: _Notes | None = None
        self._refused: BaseException | None = None  # in a backward pass
        self._place = CallSite()
        self.is_noting = False

    def begin_again(self, error: BaseException) -> bool:
        """Note the forward pass that comes next, if a backward pass was refused the first time.

        Args:
            error: what the backward pass has raised.

        Returns:
            Whether the shard is to be computed once more.
        """
        if not self._is_needed or not _is_refusal(error):
            return False
        if self._refused is None:
            self._refused = error
            # A model may take no hooks; then the operation is named alone.
            with suppress(Exception):
                self._notes = self._stack.enter_context(_noted(self.model))
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
    """Raise :class:`NondeterministicError` for what torch refuses in forward passes within a block.

    Args:
        model, is_needed: as of :class:`RefusedOperations`.
    """
    try:
        yield
    except RuntimeError as error:
        explained = RefusedOperations(model, is_needed).explained(error)
        if explained is None:
            raise
        raise explained from error


class _Notes:
    """Which module and line made each node of a graph, and which node is executed. Final.

    torch numbers nodes as they are made, so a module's are those between its begin and its end.
    """

    def __init__(self, model: nn.Module) -> None:
        self._kinds = {name: type(module).__name__ for name, module in model.named_modules()}
        self._inside: list[str] = []
        self._numbers: list[int] = []
        self._modules: list[str | None] = []
        self._nodes: list[Node] = []
        self._now: Node | None = None

    def enter(self, name: str) -> None:
        """Note that a module begins."""
        self._inside.append(name)
        self._note(name)

    def leave(self) -> None:
        """Note that it ends."""
        self._inside.pop()
        self._note(self._inside[-1] if self._inside else None)

    def watch(self, returned: Any) -> None:
        """Be told of every node that is executed."""
        torch.set_anomaly_enabled(False)  # lines are noted, and torch need not print them
        self._nodes = _graph(tree_leaves(returned))
        for node in self._nodes:
            node.register_prehook(self._reached(node))

    @property
    def last(self) -> CallSite:
        """Where the node was made that was executed last."""
        if self._now is None:
            return CallSite()
        place = _line_of(self._now)
        at = bisect.bisect_right(self._numbers, self._now._sequence_nr()) - 1
        module = self._modules[at] if at >= 0 else None
        return place if module is None else place._replace(module=module, kind=self._kinds[module])

    def _note(self, module: str | None) -> None:
        next_number: Callable[[], int] = torch._C._autograd._get_sequence_nr
        self._numbers.append(next_number())
        self._modules.append(module)

    def _reached(self, node: Node) -> Callable[[Any], None]:
        def note(_: Any) -> None:
            self._now = node

        return note


def _is_refusal(error: BaseException) -> bool:
    if not isinstance(error, RuntimeError) or isinstance(error, NondeterministicError):
        return False
    return _REFUSED.search(str(error)) is not None or WORKSPACE_VARIABLE in str(error)


@contextmanager
def _noted(model: nn.Module) -> Iterator[_Notes]:
    """Have a forward pass noted: modules by hooks, lines by torch's anomaly mode."""
    notes = _Notes(model)
    before = torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()
    with ExitStack() as stack:
        for name, module in model.named_modules():
            begun = module.register_forward_pre_hook(lambda *_, name=name: notes.enter(name))
            ended = module.register_forward_hook(lambda *_: notes.leave(), always_call=True)
            stack.callback(begun.remove)
            stack.callback(ended.remove)
        stack.callback(torch.set_anomaly_enabled, *before)
        torch.set_anomaly_enabled(True, False)
        yield notes


def _graph(returned: Sequence[Any]) -> list[Node]:
    """List the nodes behind some tensors."""
    waiting = [leaf.grad_fn for leaf in returned if isinstance(leaf, torch.Tensor)]
    found: dict[Node, None] = {}
    while waiting:
        node = waiting.pop()
        if node is not None and node not in found:
            found[node] = None
            waiting += [before for before, _ in node.next_functions]
    return list(found)


def _line_of(node: Node) -> CallSite:
    """Find the program's line in what anomaly mode has noted of a node."""
    noted: Any = node.metadata
    frames = [_FRAME.match(text) for text in noted.get("traceback_", [])]
    lines = [(frame[1], int(frame[2])) for frame in frames if frame is not None]
    return _innermost(lines)


def _place_in(error: BaseException, model: nn.Module) -> CallSite:
    """Find module and line in the traceback of an error of a forward pass."""
    names = {id(module): name for name, module in model.named_modules()}
    frames = list(walk_tb(error.__traceback__))
    place = _innermost([(frame.f_code.co_filename, line) for frame, line in frames])
    for frame, _ in reversed(frames):
        module = frame.f_locals.get("self")
        if id(module) in names:
            return place._replace(module=names[id(module)], kind=type(module).__name__)
    return place


def _innermost(lines: Sequence[tuple[str, int]]) -> CallSite:
    """Give the innermost line of the program's own."""
    for file, line in reversed(lines):
        if not file.startswith(_NOT_THE_PROGRAM):
            return CallSite(file=file, line=line)
    return CallSite()


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
        f"none: it is called in {'the backward pass of ' * is_backward}{_told(place)}. Instead, "
        f"{way_out}, or pass `exact=False`, which allows it; results may then differ from one run "
        f"to the next.",
        operation=operation,
        module=place.module,
        file=place.file,
        line=place.line,
    )


def _told(place: CallSite) -> str:
    """Say in words where an operation is called."""
    if place == CallSite():
        return "a shard"
    where = "a function outside of the model" if place.module is None else "the model"
    if place.module:
        where = f"`{place.module}` of the model"
    if place.kind:
        where += f" ({place.kind})"
    if not place.file:
        return where
    code = shown(linecache.getline(place.file, place.line).strip())
    return f"{where}, {_short(place.file)}, line {place.line}" + (f", `{code}`" if code else "")


def _short(file: str) -> str:
    """Name a file as from the working directory, where it is below that."""
    try:
        return str(Path(file).relative_to(Path.cwd()))
    except (OSError, ValueError):
        return file
