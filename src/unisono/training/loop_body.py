"""What does the body of a loop over ``step.shards`` keep from one shard to the next?

Such a body is the program's own, and is not run again, as what it counts is its own. Its source
tells which variables the loss is computed from: ::

    for x, y in step.shards:
        count += 1                           read before it is written: of the shard before
        loss = criterion(model(x), y)        written before it is read: of this shard alone
        total += loss.item()                 of the shard before, but the loss does not need it
        step.backward(loss * scale(count))

What is of the shard before, and changes while a shard is computed, is refused: `count`. So are
lists, tensors and the like that the loss needs and that change. What functions remember that the
body calls is not seen here; the first call of each model is rehearsed (``rehearsals.py``).
"""

from __future__ import annotations

import ast
import functools
import inspect
import sys
import textwrap
from collections import deque
from collections.abc import Callable, Collection, Iterator
from contextlib import suppress
from types import CodeType, FrameType
from typing import Any, NamedTuple

import torch

_COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)


class _Needed(NamedTuple):
    """The variables that a loss is computed from; attributes as ``self.count``."""

    carried: Collection[str]  # written in the body, but read before that
    read: Collection[str]  # never written there


def watched(own: Callable[[], Collection[int]], batches: Iterator[Any]) -> Iterator[Any]:
    """Give the batches of a step's shards, and look at what the loop around them keeps."""
    ours = own()
    for batch in batches:
        before = _seen(sys._getframe(1), ours)
        yield batch
        after = _seen(sys._getframe(1), ours)
        changed = (name for name in before if name in after and before[name] != after[name])
        if name := next(changed, ""):
            raise RuntimeError(
                f"the body of a loop over `step.shards` must depend on the shard alone, as each "
                f"worker computes only some of them, but `{name}` goes on from shard to shard and "
                f"the loss is computed from it: change it between steps, take the step from "
                f"`unisono.progress()`, or keep a buffer of the model (`register_buffer`)."
            )


def _seen(frame: FrameType, own: Collection[int]) -> dict[str, Any]:
    """Note the values of what the loss is computed from, as far as it may go on."""
    needed, seen = _needed_by_loss(frame.f_code, frame.f_lineno), {}
    for name in needed.carried:
        with suppress(KeyError):
            seen[name] = _noted(_value(name, frame), is_carried=True)
    for name in needed.read:
        with suppress(KeyError):
            value = _value(name, frame)
            if id(value) not in own:
                seen[name] = _noted(value, is_carried=False)
    return seen


def _value(name: str, frame: FrameType) -> Any:
    first, *attributes = name.split(".")
    value = frame.f_locals[first] if first in frame.f_locals else frame.f_globals[first]
    for attribute in attributes:
        value = getattr(value, "__dict__", {})[attribute]
    return value


def _noted(value: Any, *, is_carried: bool) -> Any:
    if isinstance(value, torch.Tensor):
        return id(value), value._version
    if isinstance(value, (list, deque, dict, set)):
        return id(value), len(value)
    if isinstance(value, (bool, int, float, complex, str)):
        return repr(value)  # NaN is like NaN
    return id(value) if is_carried else None


@functools.lru_cache(maxsize=64)
def _needed_by_loss(code: CodeType, line: int) -> _Needed:
    """Find what the innermost loop at a line of a function computes its loss from."""
    with suppress(OSError, SyntaxError, TypeError):  # there is no source, or another one
        lines, first = inspect.getsourcelines(code)
        tree = ast.parse(textwrap.dedent("".join(lines)))
        line -= max(first, 1) - 1
        around = [
            node
            for node in ast.walk(tree)
            if isinstance(node, ast.For) and node.lineno <= line <= (node.end_lineno or 0)
        ]
        if around:
            return _needed_in(max(around, key=lambda node: node.lineno))
    return _Needed((), ())


def _needed_in(loop: ast.For) -> _Needed:
    uses = _Uses()
    uses.visit(loop.target)
    for statement in loop.body:
        uses.visit(statement)
    needed, news = set[str](), uses.losses
    while news:
        needed |= news
        news = {name for of in news for name in uses.sources.get(of, ())} - needed
    is_written_first = dict(reversed(uses.order))  # what comes first counts
    written = {name for name, is_written in uses.order if is_written}
    carried = [name for name in needed & written if not is_written_first[name]]
    return _Needed(sorted(carried), sorted(needed - written))


class _Uses(ast.NodeVisitor):
    """Lists how a loop's body reads and writes variables, and what losses are of. Final."""

    def __init__(self) -> None:
        self.order: list[tuple[str, bool]] = []
        self.sources: dict[str, set[str]] = {}
        self.losses: set[str] = set()

    def visit_Name(self, node: ast.Name) -> None:
        self.order.append((node.id, isinstance(node.ctx, ast.Store)))

    def visit_Attribute(self, node: ast.Attribute) -> None:
        self.visit(node.value)
        if isinstance(node.value, ast.Name):
            name = f"{node.value.id}.{node.attr}"
            self.order.append((name, isinstance(node.ctx, ast.Store)))

    def visit_Assign(self, node: ast.Assign) -> None:
        self._assign(node.targets, node.value)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        self._assign([node.target], node.value)

    def visit_NamedExpr(self, node: ast.NamedExpr) -> None:
        self._assign([node.target], node.value)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        read = ast.parse(ast.unparse(node.target), mode="eval").body
        self._assign([node.target], ast.Tuple([read, node.value], ast.Load()))

    def visit_For(self, node: ast.For) -> None:
        self._assign([node.target], node.iter)
        for statement in (*node.body, *node.orelse):
            self.visit(statement)

    def visit_withitem(self, node: ast.withitem) -> None:
        self._assign([node.optional_vars] if node.optional_vars else [], node.context_expr)

    def visit_Lambda(self, node: ast.Lambda) -> None:
        within = _Uses()
        within.visit(node.body)
        bound = {one.arg for one in ast.walk(node.args) if isinstance(one, ast.arg)}
        self._take(within, bound)

    def visit_Call(self, node: ast.Call) -> None:
        before = len(self.order)
        self.generic_visit(node)
        if isinstance(node.func, ast.Attribute) and node.func.attr == "backward":
            self.losses |= {name for name, _ in self.order[before:]}

    def generic_visit(self, node: ast.AST) -> None:
        if not isinstance(node, _COMPREHENSIONS):
            super().generic_visit(node)
            return
        within = _Uses()
        for each in node.generators:
            within.generic_visit(each)
        for field in ("elt", "key", "value"):
            if isinstance(part := getattr(node, field, None), ast.AST):
                within.visit(part)
        self._take(within, {name for name, is_written in within.order if is_written})

    def _assign(self, targets: list[ast.expr], value: ast.expr | None) -> None:
        before = len(self.order)
        if value is not None:
            self.visit(value)
        read = {name for name, is_written in self.order[before:] if not is_written}
        between = len(self.order)
        for target in targets:
            self.visit(target)
        for name, is_written in self.order[between:]:
            if is_written:
                self.sources.setdefault(name, set()).update(read)

    def _take(self, within: _Uses, bound: set[str]) -> None:
        self.order += [use for use in within.order if use[0].split(".")[0] not in bound]
