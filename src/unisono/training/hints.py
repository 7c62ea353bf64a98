"""What may help with an exception from torch, shown only if the hint is about what failed.

The words of an exception alone would mislead: "unexpected keyword argument" may come from a
mistyped option of a loss as well as from a column that the model does not accept.
"""

from __future__ import annotations

import dis
import os
import re
from collections.abc import Callable, Mapping
from itertools import pairwise
from traceback import walk_tb
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import nn

from unisono.runtime.notices import text_of

_NN = f"{os.sep}torch{os.sep}nn{os.sep}"
NO_GRAPH = (
    "gradients must be differentiated shard by shard, as the sum over shards, which other workers "
    "have computed, too, has no graph: before a shard's loss is returned, or given to "
    "`step.backward`, call `torch.autograd.grad(loss, parameters, create_graph=True)`; what you "
    "make of it (a diagonal by Hutchinson, a gradient of each task) goes into a buffer, which "
    '`buffers={name: "mean"}` averages over all samples before the optimizer reads it.'
)
_NO_GROUP = (
    "Gradients are summed over all workers already, and each worker updates alike, so an optimizer "
    "needs no collectives: pass one that calls none, such as `torch.optim.Muon`."
)
_TORCH = os.path.dirname(torch.__file__) + os.sep
_CONSTANT = ("LOAD_CONST", "RETURN_CONST")
_OURS = __name__.partition(".")[0] + "."
_PARTS_AT_MOST = 4096  # of a batch
_LABELS = ("cross_entropy", "nll_loss")


class _Raised(NamedTuple):
    """An exception, and the frames that it passed through, the outermost first."""

    error: BaseException
    frames: list[FrameType]

    def is_within(self, *names: str) -> bool:
        """Return whether it was raised in torch.nn, in one of these functions; none: in any."""
        code = self.frames[-1].f_code
        return _NN in code.co_filename and (not names or code.co_name in names)

    def local(self, name: str) -> Any:
        """Return a tensor argument of the function that raised; None if it is not a tensor."""
        value = self.frames[-1].f_locals.get(name)
        return value if isinstance(value, torch.Tensor) else None


def _is_of_optimizer(raised: _Raised) -> bool:
    return any(isinstance(f.f_locals.get("self"), torch.optim.Optimizer) for f in raised.frames)


def _is_of_labels(raised: _Raised) -> bool:
    return raised.is_within(*_LABELS)


def _has_one_column(raised: _Raised) -> bool:
    target = raised.local("target")
    return _is_of_labels(raised) and target is not None and target.shape[1:] == (1,)


def _are_rows_of_classes(raised: _Raised) -> bool:
    given, target = raised.local("input"), raised.local("target")
    is_known = _is_of_labels(raised) and given is not None and target is not None
    return is_known and given.shape == target.shape


def _is_of_linear_layer(raised: _Raised) -> bool:
    given = raised.local("input")
    return raised.is_within("forward") and given is not None and given.ndim > 2


def _is_of_model(raised: _Raised) -> bool:
    """Return whether it was raised by the call of a module that no other module called."""
    called = [f for f in raised.frames if f.f_code is nn.Module._call_impl.__code__]
    return len(called) == 1 and not isinstance(called[0].f_locals["self"], nn.modules.loss._Loss)


def _is_of_batch(raised: _Raised) -> bool:
    """Return whether the object without such an attribute is part of the program's batch."""
    names = (frame.f_globals.get("__name__", "") for frame in raised.frames)
    at = next((at for at, name in enumerate(names) if not name.startswith(_OURS)), None)
    if at is None:
        return False
    frame = raised.frames[at]
    code, kept = frame.f_code, frame.f_locals
    given = code.co_varnames[: code.co_argcount] if at else [*kept]  # of a loss, or of a loop
    values = [kept[name] for name in given if name in kept]
    return any(_holds(value, getattr(raised.error, "obj", None)) for value in values)


def _holds(tree: Any, wanted: Any, depth: int = 3) -> bool:
    if tree is wanted:
        return wanted is not None
    parts = [*tree.values()] if isinstance(tree, Mapping) else tree
    if not depth or not isinstance(parts, (tuple, list)) or len(parts) > _PARTS_AT_MOST:
        return False
    return any(_holds(part, wanted, depth - 1) for part in parts)


def _forward_returns_nothing(raised: _Raised) -> bool:
    """Return whether a module that the program's innermost function calls always returns None."""
    own = [frame for frame in raised.frames if not frame.f_code.co_filename.startswith(_TORCH)]
    kept = own[-1].f_locals if own else {}
    modules: list[nn.Module] = []
    for value in kept.values():
        if isinstance(value, nn.Module):  # in a module's `forward`, its children
            is_itself = kept.get("self") is value
            modules += [*value.children()] if is_itself else [value]
    return any(_returns_none(type(one).forward) for one in modules)


def _returns_none(function: Any) -> bool:
    """Return whether a function returns, and only None."""
    code = getattr(function, "__code__", None)
    if code is None or code.co_filename.startswith(_TORCH):
        return False
    steps = list(dis.get_instructions(code))
    given = [before for before, each in pairwise(steps) if each.opname == "RETURN_VALUE"]
    given += [each for each in steps if each.opname == "RETURN_CONST"]
    is_none = (each.opname in _CONSTANT and each.argval is None for each in given)
    return bool(given) and all(is_none)


class _Hint(NamedTuple):
    words: str  # of the exception
    is_about: Callable[[_Raised], bool]
    text: str


_HINTS = (
    _Hint(
        "NoneType",
        _forward_returns_nothing,
        "The model returns None: end its `forward` with `return`, and what it has computed.",
    ),
    _Hint(
        "does not require grad and does not have a grad_fn",
        _is_of_optimizer,
        NO_GRAPH[0].upper() + NO_GRAPH[1:],
    ),
    _Hint("make sure to call init_process_group", _is_of_optimizer, _NO_GROUP),
    _Hint(
        r"\bDouble\b",
        _Raised.is_within,
        "Arrays of numpy are float64, parameters float32: call `.float()` on samples.",
    ),
    _Hint(
        "shapes cannot be multiplied",
        _is_of_linear_layer,
        "Samples have more dimensions than the linear layer takes: begin with `nn.Flatten()`.",
    ),
    _Hint(
        "not compiled with CUDA|on the same device",
        lambda raised: True,
        "Unisono moves the model and batches to the device of each worker: leave `.cuda()` and "
        "`.to(device)` out, and make new tensors with `device=` of an input.",
    ),
    _Hint(
        "dtype to be Long|scalar type Long",
        _is_of_labels,
        "Labels are class numbers in int64: call `.long()`.",
    ),
    _Hint(
        "multi-target not supported",
        _has_one_column,
        "Labels are of shape (samples,): call `.squeeze(1)` on them.",
    ),
    _Hint(
        "target with class probabilities|scalar type Long|multi-target not supported",
        _are_rows_of_classes,
        "Labels with a column for each class are probabilities in the dtype of the outputs: call "
        "`.to(outputs.dtype)` on them, or `.argmax(1)` for class numbers.",
    ),
    _Hint(
        r"^Target -?\d+ is out of bounds",
        _is_of_labels,
        "Labels are class numbers from 0, below the number of the model's outputs.",
    ),
    _Hint(
        "index out of range in self",
        lambda raised: raised.is_within("embedding"),
        "Numbers that an embedding gets are below its `num_embeddings`.",
    ),
    _Hint(
        "'(list|str)' object has no attribute '(size|shape|dim|ndim|device|to|float|long)'",
        _is_of_batch,
        'Let a `collate_fn` make tensors, or `with_format("torch")` of a `datasets.Dataset`.',
    ),
    _Hint(
        r"forward\(\) got an unexpected keyword argument",
        _is_of_model,
        "Name what the model takes of a batch, or leave the rest out of samples (`remove_columns` "
        "of a `datasets.Dataset`).",
    ),
)


def hint_for(error: BaseException) -> str:
    """Return what may help; empty if nothing is known."""
    frames = [frame for frame, _ in walk_tb(error.__traceback__)]
    if not frames:
        return ""
    raised, words = _Raised(error, frames), text_of(error)
    fit = (hint.text for hint in _HINTS if re.search(hint.words, words) and hint.is_about(raised))
    return next(fit, "")
