"""Watches modules: what do forward passes get, in which state, and which losses are computed?

Dropout draws its random numbers as ever but keeps every element, so that runs on different numbers
of ranks can be compared.
"""

from __future__ import annotations

import functools
import inspect
import re
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.nn.modules import module as module_module
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parameter import is_lazy

from unisono.runtime.dtypes import dtype_name
from unisono.tools.verify.digests import (
    digest_of_tensor,
    digests_of,
    row_hashes,
    rows_of_tensors,
    storages_of,
)
from unisono.tools.verify.recorder import BatchPlace, Recorder, observe, wrap

# What wrappers of torch, Lightning and torch.compile put before a name.
_WRAPPERS = re.compile(r"(^|(?<=\.))(module|_forward_module|_original_module|_orig_mod)\.")
_FRAMES_AT_MOST = 5
_DROPOUTS = (
    *("dropout", "alpha_dropout", "feature_alpha_dropout"),
    *("dropout1d", "dropout2d", "dropout3d"),
)
_TARGET_LOSSES = ("cross_entropy", "nll_loss")
_MEAN_LOSSES = (
    *("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "kl_div"),
    *("binary_cross_entropy", "binary_cross_entropy_with_logits"),
)


class ModuleHooks:
    """Hooks around every module's forward pass. Final.

    Attributes:
        names: of parameters, by their id.
        forwards: how many outermost forward passes there were.
    """

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self.names: dict[int, str] = {}
        self.forwards = 0
        self._last_step = -1
        self._taken: set[str] = set()
        self._kept: list[torch.Tensor] = []
        self._depth = 0
        self._root: nn.Module | None = None
        self._facts: dict[str, Any] = {}
        self._wants_state = False

    def install(self) -> None:
        """Put the hooks in place."""
        self._recorder.handles += [
            module_module.register_module_forward_pre_hook(self._before),
            module_module.register_module_forward_hook(self._after, always_call=True),
        ]
        _keep_everything(self._recorder)
        for names, count in ((_MEAN_LOSSES, _num_elements), (_TARGET_LOSSES, _num_targets)):
            for name in names:
                observe(self._recorder, functional, name, functools.partial(self._count, count))

    def _before(self, module: nn.Module, inputs: Any) -> None:
        self._depth += 1
        if torch.compiler.is_compiling():
            return
        with self._recorder.guarded():
            if self._depth == 1:
                self._begin(module, (inputs, _named_inputs()))
            if self._wants_state and not _has_ddp(module):
                self._wants_state = False
                self._record_state()

    def _begin(self, module: nn.Module, inputs: Any) -> None:
        self._root = None
        if next(module.parameters(), None) is None:
            return
        self._root = module
        self._learn_names(module)
        records = torch.is_grad_enabled()
        self._facts = {
            "f": self.forwards,
            "grad": records,
            "training": module.training,
            "at": self._batch_of(inputs),
            "rows": row_hashes(inputs),
        }
        self.forwards += 1
        is_first = self._last_step != self._recorder.num_steps
        self._wants_state = records and module.training and is_first
        self._rng_before = _rng_digest()

    def _batch_of(self, inputs: Any) -> BatchPlace | None:
        """Find the batch that inputs are, or are a part of; else it is the newest one, if any."""
        places, rows = storages_of(inputs), rows_of_tensors(inputs)
        given = list(reversed(self._recorder.given))
        # Some libraries copy a batch, even to the device where it is already.
        found = [at for at, batch in given if places & storages_of(batch)] or [
            at for at, batch in given if rows and rows <= rows_of_tensors(batch)
        ]
        newest = [] if self._recorder.is_between else [at for at, _ in given]
        return next(iter(found or newest), None)

    def _after(self, module: nn.Module, inputs: Any, outputs: Any) -> None:
        self._depth = max(0, self._depth - 1)
        if self._depth == 0 and self._root is module:
            self._root = None
            self._recorder.write("f", **self._facts, draws=_rng_digest() != self._rng_before)

    def _learn_names(self, root: nn.Module) -> None:
        """Name the parameters below a module, without the prefixes of wrappers."""
        for name, parameter in root.named_parameters():
            if id(parameter) not in self.names:
                bare = name_without_wrappers(name)
                while bare in self._taken:
                    bare += "'"
                self._taken.add(bare)
                self.names[id(parameter)] = bare
                self._kept.append(parameter)  # or another one may get its id

    def _record_state(self) -> None:
        """Take down a :class:`unisono.tools.verify.trace.ModelState`."""
        root = self._root
        if root is None:
            return
        self._last_step = self._recorder.num_steps
        named = [(self.names[id(p)], p) for p in root.parameters() if not is_lazy(p)]
        buffers = [(name_without_wrappers(name), buffer) for name, buffer in root.named_buffers()]
        self._recorder.write(
            "state",
            parameters=digests_of(named),
            buffers=digests_of(buffers),
            rng=self._rng_before,
            has_batch_norm=any(_is_plain_batch_norm(module) for module in root.modules()),
            dtype=_computing_dtype(named[0][1].dtype if named else torch.float32),
        )

    def _count(self, count: Callable[..., int], *args: Any, **kwargs: Any) -> None:
        """Count over how many targets a loss is a mean."""
        if torch.is_grad_enabled():
            self._recorder.write("loss", count=count(*args, **kwargs))


def name_without_wrappers(name: str) -> str:
    """Take off what DDP, Fabric and torch.compile put before the names of a model."""
    while (bare := _WRAPPERS.sub("", name)) != name:
        name = bare
    return name


def _named_inputs() -> dict[str, Any]:
    """Find the inputs that the module whose hook is running was given by name.

    torch hands hooks of all modules those without names alone.
    """
    frame: FrameType | None = sys._getframe(1)
    for _ in range(_FRAMES_AT_MOST):
        if frame is None:
            break
        if frame.f_code.co_filename == module_module.__file__ and "kwargs" in frame.f_locals:
            return dict(frame.f_locals["kwargs"])
        frame = frame.f_back
    return {}


def _has_ddp(module: nn.Module) -> bool:
    ddp = nn.parallel.DistributedDataParallel
    return any(isinstance(child, ddp) for child in module.modules())


def _is_plain_batch_norm(module: nn.Module) -> bool:
    is_plain = isinstance(module, _BatchNorm) and not isinstance(module, nn.SyncBatchNorm)
    return is_plain and module.training


def _computing_dtype(dtype: torch.dtype) -> str:
    if torch.is_autocast_enabled("cpu"):
        dtype = torch.get_autocast_dtype("cpu")
    return dtype_name(dtype)


def _rng_digest() -> str:
    return digest_of_tensor(torch.get_rng_state())


def _num_targets(input: Any, target: Any, *args: Any, ignore_index: int = -100, **_: Any) -> int:
    if target.is_floating_point():
        return int(target.numel() // target.shape[1])
    return int((target != ignore_index).sum())


def _num_elements(input: Any, target: Any, *args: Any, **_: Any) -> int:
    return int(target.numel())


def _keep_everything(recorder: Recorder) -> None:
    for name in _DROPOUTS:
        # Two of torch's own have another default.
        default = inspect.signature(getattr(functional, name)).parameters["training"].default
        wrap(functional, name, functools.partial(_keep, recorder, default))
    wrap(functional, "scaled_dot_product_attention", functools.partial(_attend, recorder))


def _attend(recorder: Recorder, before: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    if not _drops_nothing(recorder):
        return before(*args, **kwargs)
    drops = kwargs.pop("dropout_p", 0.0)
    if len(args) > 4:
        drops, args = args[4], (*args[:4], 0.0, *args[5:])
    if drops:
        torch.rand(1)
    return before(*args, **kwargs)


def _drops_nothing(recorder: Recorder) -> bool:
    return not recorder.is_exact and not recorder.options.replays


def _keep(
    recorder: Recorder,
    default: bool,
    drop: Callable[..., torch.Tensor],
    input: torch.Tensor,
    p: float = 0.5,
    training: bool | None = None,
    inplace: bool = False,
) -> torch.Tensor:
    """Draw what a dropout draws, and return its input."""
    training = default if training is None else training
    if not _drops_nothing(recorder):
        return drop(input, p, training, inplace)
    if training and p > 0:
        drop(input.detach(), p, True, False)
    return input
