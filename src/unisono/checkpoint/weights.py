"""Weights in a file: safetensors, with the names that the plain model gives them."""

from __future__ import annotations

import os
from pathlib import Path

import torch
from safetensors.torch import save as to_safetensors
from torch import nn

_WRAPPER_PREFIXES = ("module.", "_orig_mod.")


def plain_weights(model: nn.Module) -> dict[str, torch.Tensor]:
    """Give the model's state dict under plain names; tied tensors once, under the first name."""
    weights: dict[str, torch.Tensor] = {}
    seen: set[tuple[int, tuple[int, ...], tuple[int, ...]]] = set()
    for name, tensor in model.state_dict().items():
        if not isinstance(tensor, torch.Tensor):
            continue
        place = (tensor.data_ptr(), tuple(tensor.shape), tensor.stride())
        if tensor.numel() and place in seen:
            continue
        seen.add(place)
        weights[_plain(name)] = tensor.detach().contiguous().clone()
    return weights


def save_weights(model: nn.Module, path: str | os.PathLike[str]) -> None:
    """Write the model's weights; a reader finds the old file or the whole new one.

    Raises:
        OSError: the folder does not exist or cannot be written.
    """
    path = Path(path)
    if not path.parent.is_dir():
        raise FileNotFoundError(
            f"the folder of {path} must exist, but does not: make it first, or save elsewhere."
        )
    if path.is_dir():
        raise IsADirectoryError(
            f"`path` must name a file, but {path} is a folder: save to a file in it."
        )
    beside = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with open(beside, "xb") as file:
            file.write(to_safetensors(plain_weights(model)))
            file.flush()
            os.fsync(file.fileno())
        os.replace(beside, path)
    except PermissionError as error:
        raise PermissionError(
            f"the folder of {path} must be writable, but is not ({error.strerror}): change its "
            f"permissions, or save elsewhere."
        ) from None
    finally:
        beside.unlink(missing_ok=True)


def _plain(name: str) -> str:
    for prefix in _WRAPPER_PREFIXES:
        name = name.removeprefix(prefix)
    return name
