"""Watches modules: inputs and state of forward passes. Dropout drops nothing."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any, final

import torch
from torch import nn
from torch.nn import functional
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parameter import is_lazy

from unisono.runtime.dtypes import dtype_name
from unisono.tools.verify.digests import digest_of_tensor, digests_of, row_hashes, rows_of_tensors
from unisono.tools.verify.recorder import Recorder, wrap
from unisono.tools.verify.trace import Forward, ModelState, Place

# Prefixes of names from wrappers of torch, Lightning and torch.compile.
_WRAPPERS = re.compile(r"(^|(?<=\.))(module|_forward_module|_original_module|_orig_mod)\.")
_DROPOUTS = "dropout alpha_dropout feature_alpha_dropout dropout1d dropout2d dropout3d"


@final
class ModuleHooks:
    """A hook around every module's call."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self.names: dict[torch.Tensor, str] = {}  # of parameters
        self.forwards = 0  # number of outermost forward passes
        self.first = -1  # number of the first one since the newest backward pass; -1: none
        self.has_drawn = False  # whether one of training drew random numbers since then
        self.inputs: list[str] = []  # rows of those of training since the newest step
        self.state: ModelState | None = None  # when the first one of a step began
        self._last_step = -1
        self._depth = 0
        self._root: nn.Module | None = None
        self._trains = self._wants_state = False

    def install(self) -> None:
        """Install the hooks."""
        wrap(nn.Module, "__call__", self._call)
        if not self._recorder.options.replays:
            for name in _DROPOUTS.split():
                wrap(functional, name, functools.partial(_keep, self._recorder))
            attend = functools.partial(_attend, self._recorder)
            wrap(functional, "scaled_dot_product_attention", attend)

    def _call(
        self, before: Callable[..., Any], module: nn.Module, /, *args: Any, **named: Any
    ) -> Any:
        if self._recorder.is_exact or torch.compiler.is_compiling():
            return before(module, *args, **named)
        self._depth += 1
        with self._recorder.guarded():
            if self._depth == 1:
                self._begin(module, (args, named))
            if self._wants_state and not _has_ddp(module):
                self._wants_state = False
                self._note_state()
        try:
            return before(module, *args, **named)
        finally:
            self._depth -= 1
            if self._depth == 0 and self._root is not None:
                self._root = None
                self.has_drawn |= self._trains and _rng_digest() != self._rng_before

    def _begin(self, module: nn.Module, inputs: Any) -> None:
        self._root = None
        if next(module.parameters(), None) is None:
            return
        self._root = module
        for name, parameter in module.named_parameters():
            if parameter not in self.names:
                bare = name_without_wrappers(name)
                while bare in self.names.values():
                    bare += "'"
                self.names[parameter] = bare
        at, rows, records = self._batch_of(inputs), row_hashes(inputs), torch.is_grad_enabled()
        self._trains = records and module.training
        self._recorder.write(Forward(self.forwards, at, rows, module.training, self._trains))
        if records and self.first < 0:
            self.first = self.forwards
        self.forwards += 1
        self.inputs += rows if self._trains else []
        self._wants_state = self._trains and self._last_step != self._recorder.num_steps
        self._rng_before = _rng_digest()

    def _batch_of(self, inputs: Any) -> Place | None:
        """Return the batch that inputs are from; otherwise the newest one, if any."""
        rows, given = rows_of_tensors(inputs), reversed(self._recorder.given)
        found = [(len(rows & those), at) for at, those in given]
        num_shared, at = max(found, key=lambda one: one[0], default=(0, None))
        return at if num_shared or not self._recorder.is_between else None

    def _note_state(self) -> None:
        root = self._root
        assert root is not None
        self._last_step = self._recorder.num_steps
        named = [(self.names[p], p) for p in root.parameters() if not is_lazy(p)]
        buffers = [(name_without_wrappers(name), buffer) for name, buffer in root.named_buffers()]
        self.state = ModelState(
            parameters=digests_of(named),
            buffers=digests_of(buffers),
            rng=self._rng_before,
            has_batch_norm=any(_is_plain_batch_norm(module) for module in root.modules()),
            dtype=dtype_name(
                torch.get_autocast_dtype("cpu")
                if torch.is_autocast_enabled("cpu")
                else next((p.dtype for _, p in named), torch.float32)
            ),
        )


def name_without_wrappers(name: str) -> str:
    """Return a name without the prefixes of DDP, Fabric and torch.compile."""
    while (bare := _WRAPPERS.sub("", name)) != name:
        name = bare
    return name


def _has_ddp(module: nn.Module) -> bool:
    ddp = nn.parallel.DistributedDataParallel
    return any(isinstance(child, ddp) for child in module.modules())


def _is_plain_batch_norm(module: nn.Module) -> bool:
    is_plain = isinstance(module, _BatchNorm) and not isinstance(module, nn.SyncBatchNorm)
    return is_plain and module.training


def _rng_digest() -> str:
    return digest_of_tensor(torch.get_rng_state())


def _attend(recorder: Recorder, before: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    if recorder.is_exact:
        return before(*args, **kwargs)
    drops = kwargs.pop("dropout_p", 0.0)
    if len(args) > 4:
        drops, args = args[4], (*args[:4], 0.0, *args[5:])
    if drops:
        torch.rand(1)
    return before(*args, **kwargs)


def _keep(recorder: Recorder, drop: Callable[..., Any], input: Any, *args: Any, **kw: Any) -> Any:
    """Draw the random numbers of a dropout, and return its input."""
    if recorder.is_exact:
        return drop(input, *args, **kw)
    drop(input.detach().clone(), *args, **kw)
    return input
