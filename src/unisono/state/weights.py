"""Save weights as safetensors, under the names that the plain model gives them.

Wrappers change the names: DDP puts ``module.`` before all of them, ``torch.compile`` an
``_orig_mod.`` wherever a compiled module is. Weights are written without; see ``state.load`` for
how they are read.
"""

from __future__ import annotations

import os
from collections.abc import Collection
from pathlib import Path

import torch
from safetensors.torch import save as to_safetensors
from torch import nn
from torch.nn.parameter import is_lazy

from unisono.dtypes import CODES
from unisono.notices import shown
from unisono.plainfile import written_whole


def plain_weights(model: nn.Module) -> dict[str, torch.Tensor]:
    """Give the model's state dict under plain names; tied tensors once, under the first name."""
    weights: dict[str, torch.Tensor] = {}
    seen: set[object] = set()
    tensors = tensors_of(model)
    plain = plain_names(tensors)
    for name, tensor in tensors.items():
        place = place_of(tensor)
        if place not in seen:
            seen.add(place)
            weights[plain[name]] = tensor.detach().clone(memory_format=torch.contiguous_format)
    return weights


def check_weights(model: nn.Module) -> None:
    """Refuse, with a ValueError, weights of a dtype that safetensors files cannot hold."""
    for name, tensor in tensors_of(model).items():
        if str(tensor.dtype) not in CODES:
            raise ValueError(
                f"weights must have a dtype that safetensors files hold, but `{name}` is "
                f"{tensor.dtype}: convert it, or write `model.state_dict()` with torch.save."
            )


def save_weights(model: nn.Module, path: str | os.PathLike[str]) -> None:
    """Write the model's weights; a reader finds the old file or the whole new one.

    Raises:
        OSError: the folder does not exist or cannot be written.
        ValueError: there are weights that no such file can hold.
    """
    check_weights(model)
    path = Path(path)
    if not path.parent.is_dir():
        raise FileNotFoundError(
            f"the folder of {shown(path, 1000)} must exist, but does not: make it first, or save "
            f"elsewhere."
        )
    if path.is_dir():
        raise IsADirectoryError(
            f"`path` must name a file, but {shown(path, 1000)} is a folder: save to a file in it."
        )
    try:
        with written_whole(path) as file:
            file.write(to_safetensors(plain_weights(model)))
    except PermissionError as error:
        raise PermissionError(
            f"the folder of {shown(path, 1000)} must be writable, but is not ({error.strerror}): "
            f"change its permissions, or save elsewhere."
        ) from None


def tensors_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """Name the tensors of the state dict, each as often as it has names."""
    named = model.state_dict(keep_vars=True)
    return {name: tensor for name, tensor in named.items() if isinstance(tensor, torch.Tensor)}


def plain_names(names: Collection[str]) -> dict[str, str]:
    """Find the names that tensors have in the plain model.

    ``module`` is a wrapper's only where everything is below it, and no two names become one.
    """
    paths = {name: name.split(".") for name in names}
    inner = {
        name: [*(word for word in path[:-1] if word != "_orig_mod"), path[-1]]
        for name, path in paths.items()
    }
    while inner and all(len(path) > 1 and path[0] == "module" for path in inner.values()):
        inner = {name: path[1:] for name, path in inner.items()}
    plain = {name: ".".join(path) for name, path in inner.items()}
    return plain if len(set(plain.values())) == len(plain) else {name: name for name in names}


def place_of(tensor: torch.Tensor) -> object:
    """Identify a tensor, whatever object it is: by its memory, if it has any."""
    if is_lazy(tensor) or tensor.numel() == 0 or tensor.is_meta:
        return id(tensor)
    return tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.device
