"""Which module and which line made each node of autograd's graph? Noted in a forward pass.

A backward pass has no frames of the forward pass. So where something goes wrong in it, the shard is
computed once more, in a step that fails anyway, and each node is noted with the module and the line
that made it. Passes that succeed cost nothing.
"""

from __future__ import annotations

import bisect
import linecache
import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.autograd.graph import Node
from torch.utils._pytree import tree_leaves

from unisono.notices import shown

_FRAME = re.compile(r'\s*File "([^"\n]+)", line (\d+)')
_NOT_THE_PROGRAM = (
    f"{os.path.dirname(torch.__file__)}{os.sep}",
    f"{Path(__file__).resolve().parents[1]}{os.sep}",
    "<",
)


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


class Notes:
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
        self._nodes = graph_of(tree_leaves(returned))
        for node in self._nodes:
            node.register_prehook(self._reached(node))

    @property
    def last(self) -> CallSite:
        """Where the node was made that was executed last."""
        return CallSite() if self._now is None else self.place_of(self._now)

    def place_of(self, node: Node) -> CallSite:
        """Where a node of the forward pass was made."""
        place = _line_of(node)
        at = bisect.bisect_right(self._numbers, node._sequence_nr()) - 1
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


@contextmanager
def noted(model: nn.Module) -> Iterator[Notes]:
    """Have a forward pass noted: modules by hooks, lines by torch's anomaly mode."""
    notes = Notes(model)
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


def graph_of(returned: Sequence[Any]) -> list[Node]:
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
    return innermost(lines)


def innermost(lines: Sequence[tuple[str, int]]) -> CallSite:
    """Give the innermost line of the program's own."""
    for file, line in reversed(lines):
        if not file.startswith(_NOT_THE_PROGRAM):
            return CallSite(file=file, line=line)
    return CallSite()


def in_words(place: CallSite) -> str:
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
