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
from typing import Any, cast

import torch
from torch import nn
from torch.nn import functional
from torch.nn.modules import module as module_module
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parameter import is_lazy

from unisono.verify.recorder import BatchPlace, Recorder
from unisono.verify.sample_contents import row_hashes, rows_of_tensors, storages_of
from unisono.verify.sketches import digest_of_tensor
from unisono.verify.wrapping import wrap

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
        self.last_step = -1
        self._taken: set[str] = set()
        self._kept: list[torch.Tensor] = []
        self._depth = 0
        self._root: nn.Module | None = None
        self._facts: dict[str, Any] = {}
        self._wants_state = False
        self._handles: list[Any] = []

    def install(self) -> None:
        """Put the hooks in place."""
        self._handles = [
            module_module.register_module_forward_pre_hook(self._before),
            module_module.register_module_forward_hook(self._after, always_call=True),
        ]
        _keep_everything(self._recorder)
        self._wrap_losses()

    def remove(self) -> None:
        """Take the hooks of forward passes away."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

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
        self.learn_names(module)
        records = torch.is_grad_enabled()
        self._facts = {
            "f": self.forwards,
            "grad": records,
            "training": module.training,
            "at": self._batch_of(inputs),
            "rows": row_hashes(inputs),
        }
        self.forwards += 1
        self._wants_state = (
            records and module.training and self.last_step != self._recorder.num_steps
        )
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

    def learn_names(self, root: nn.Module) -> None:
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
        root = self._root
        if root is None:
            return
        self.last_step = self._recorder.num_steps
        named = [item for item in root.named_parameters() if not is_lazy(item[1])]
        self._recorder.write(
            "state",
            step=self._recorder.num_steps,
            parameters={self.names[id(p)]: digest_of_tensor(p) for _, p in named},
            buffers={
                name_without_wrappers(name): digest_of_tensor(buffer)
                for name, buffer in root.named_buffers()
            },
            rng=self._rng_before,
            batch_norm=any(_is_plain_batch_norm(module) for module in root.modules()),
            dtype=_computing_dtype(named[0][1].dtype if named else torch.float32),
        )

    def _wrap_losses(self) -> None:
        counts: dict[str, Callable[..., int]] = dict.fromkeys(_MEAN_LOSSES, _num_elements)
        for name, count in (counts | dict.fromkeys(_TARGET_LOSSES, _num_targets)).items():
            wrap(functional, name, functools.partial(self._count, name, count))

    def _count(
        self,
        name: str,
        count: Callable[..., int],
        before: Callable[..., Any],
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            with self._recorder.guarded():
                self._recorder.write("loss", name=name, count=count(*args, **kwargs))
        return before(*args, **kwargs)


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
    return str(dtype).removeprefix("torch.")


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
        setattr(functional, name, _keeping(recorder, getattr(functional, name)))
    attention = functools.partial(_attend, recorder)
    wrap(functional, "scaled_dot_product_attention", attention)


def _attend(recorder: Recorder, before: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    if recorder.is_exact or recorder.options.replays:
        return before(*args, **kwargs)
    args, dropped = _without_dropout(args, kwargs)
    if dropped:
        torch.rand(1)
    return before(*args, **kwargs)


def _without_dropout(args: Any, kwargs: Any) -> tuple[Any, bool]:
    dropped = bool(kwargs.pop("dropout_p", 0.0))
    if len(args) > 4:
        dropped = bool(args[4])
        args = (*args[:4], 0.0, *args[5:])
    return args, dropped


def _keeping(recorder: Recorder, drop: Callable[..., Any]) -> Callable[..., Any]:
    """Draw what a dropout draws, and return its input."""
    # Two of torch's own have another default.
    default = bool(inspect.signature(drop).parameters["training"].default)

    @functools.wraps(drop)
    def keep(
        input: torch.Tensor, p: float = 0.5, training: bool = default, inplace: bool = False
    ) -> torch.Tensor:
        if recorder.is_exact or recorder.options.replays:
            return cast(torch.Tensor, drop(input, p, training, inplace))
        if training and p > 0:
            drop(input.detach(), p, True, False)
        return input

    return keep
