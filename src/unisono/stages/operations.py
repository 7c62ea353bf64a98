"""Which of torch's functions change something, need no values, or cannot be cut into stages?"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from unisono.stages.held import tensors_in

_Tensor = torch.Tensor


def checkpointed_region() -> object:
    """Tell the innermost function that torch's checkpoint is calling from others, if there is one.

    Without reentering, that is; it notes what is saved for the backward pass.
    """
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    if not hooks or "checkpoint" not in getattr(hooks[0], "__qualname__", ""):
        return None
    return hooks[0]


def name_of_operation(func: Callable[..., Any]) -> str:
    """Name one of torch's functions, or the property that it is for."""
    name: str = getattr(func, "__name__", str(func))
    of: Any = getattr(func, "__self__", None)
    return str(of.__name__) if name in ("__get__", "__set__") else name


def changed_by(
    func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> list[torch.Tensor]:
    """List the tensors that an operation changes in place."""
    if func in _STATISTICS:
        return _STATISTICS[func](args, kwargs)
    name = getattr(func, "__name__", "")
    into: tuple[Any, ...] = ()
    if (is_in_place(name) or kwargs.get("inplace") is True) and args:
        into = (args[0],)
    elif kwargs.get("inplace") is True:
        into = (kwargs.get("input"),)
    return tensors_in(*into, kwargs.get("out"))


def is_in_place(name: str) -> bool:
    """Tell whether a function of this name changes its first argument."""
    return (name.endswith("_") and not name.endswith("__")) or name in _IN_PLACE


def _running_statistics(first: int, training: int) -> Callable[[Any, Any], list[torch.Tensor]]:
    """Find the running mean and variance among the arguments of a normalization.

    Args:
        first: the position of the mean.
        training: that of the switch that has them updated.
    """

    def find(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
        given = dict(enumerate(args))
        is_updated = given.get(training, kwargs.get("training", kwargs.get("use_input_stats")))
        mean = given.get(first, kwargs.get("running_mean"))
        variance = given.get(first + 1, kwargs.get("running_var"))
        return [one for one in (mean, variance) if one is not None] if is_updated else []

    return find


_STATISTICS: dict[Any, Callable[[Any, Any], list[torch.Tensor]]] = {
    F.batch_norm: _running_statistics(1, 5),
    F.instance_norm: _running_statistics(1, 5),
    torch.batch_norm: _running_statistics(3, 5),
    torch.instance_norm: _running_statistics(3, 5),
}
_IN_PLACE = {
    "__setitem__",
    *(
        f"__i{name}__"
        for name in (
            *("add", "sub", "mul", "truediv", "floordiv", "div", "mod", "pow"),
            *("and", "or", "xor", "lshift", "rshift", "matmul"),
        )
    ),
}
RESHAPING = {
    *("squeeze_", "unsqueeze_", "transpose_", "t_", "swapaxes_", "swapdims_", "resize_"),
    *("resize_as_", "as_strided_", "detach_", "requires_grad_"),
}
INDEXING = {_Tensor.__getitem__, _Tensor.__setitem__}
HOOKS = {_Tensor.register_hook, _Tensor.retain_grad}


def _getters(*names: str) -> set[Any]:
    return {getattr(_Tensor, name).__get__ for name in names}


ANYWHERE = {
    *_getters("shape", "dtype", "layout", "ndim", "requires_grad", "is_leaf", "_version"),
    *_getters("grad", "_base", "output_nr", "is_quantized", "is_sparse", "is_nested", "grad_fn"),
    *_getters("itemsize", "nbytes"),
    *(_Tensor.size, _Tensor.dim, _Tensor.stride, _Tensor.numel, _Tensor.is_floating_point),
    *(_Tensor.is_complex, _Tensor.is_contiguous, _Tensor.element_size, _Tensor.__len__),
    *(_Tensor.__hash__, _Tensor.ndimension, _Tensor.is_signed, _Tensor.nelement),
    *(_Tensor.storage_offset, _Tensor.is_conj, _Tensor.is_neg, _Tensor.is_inference),
    *(torch.is_floating_point, torch.is_complex, torch.numel, torch.is_grad_enabled),
    *(_Tensor.requires_grad_, _Tensor.__repr__),
}
DEVICES = {
    *_getters("device", "is_cuda", "is_cpu", "is_meta", "is_mps", "is_xpu"),
    _Tensor.get_device,
}
REFUSED = {_Tensor.backward, torch.autograd.grad, torch.autograd.backward}
