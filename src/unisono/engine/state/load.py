"""Load weights from a file into a model, from any library and under any wrapper; and save them.

Wrappers change names: DDP puts ``module.`` before all of them, ``torch.compile`` an ``_orig_mod.``
wherever a module is compiled. Weights are saved without these prefixes, and loading ignores them.
Only values are read, and a model is changed only if all of them fit.
"""

from __future__ import annotations

import itertools
import os
import pickle
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import torch
from safetensors.torch import save as to_safetensors
from torch import nn
from torch.nn.parameter import is_lazy

from unisono.engine.state.contents import check_module
from unisono.engine.state.saved import bytes_at_most, read_tensors
from unisono.errors import CheckpointError
from unisono.runtime.checkpoint.folder import (
    COMMIT,
    MODEL_FILE,
    TooLargeError,
    check_size,
    read_folder,
)
from unisono.runtime.checkpoint.remote import refuse_url
from unisono.runtime.checkpoint.run_directory import RunDirectory
from unisono.runtime.checkpoint.sealed import CHUNK_BYTES, Sealed
from unisono.runtime.device import HOST, is_on_host
from unisono.runtime.dtypes import CODES
from unisono.runtime.notices import named, shown
from unisono.runtime.plainfile import check_path, path_given, written_whole

TORCHS_SUFFIXES = (".pt", ".pth", ".bin", ".ckpt", ".pkl")
_NAMES_AT_MOST = 4  # in a message
_NOT_OF_THE_MODEL = "optimizer."  # parameters that only the optimizer of a checkpoint's run has


def load_weights(
    path: str | os.PathLike[str], model: nn.Module, *, strict: bool = True
) -> tuple[list[str], list[str]]:
    """Load the weights of a file into a model, or leave it as it is.

    Args:
        path: a safetensors file (that of ``trainer.save``, say), a state dict written by
            ``torch.save``, a checkpoint's folder, or a run directory (its newest whole
            checkpoint).
        model: may be wrapped by DDP or compiled, as may have been the one that was saved.
        strict: whether names and dtypes must all agree. If not, what has a name in both is
            loaded and converted to the model's dtype; shapes must agree all the same.

    Returns:
        The model's names without weights and the file's without a place; both empty if `strict`.

    Raises:
        FileNotFoundError: there is no such file.
        CheckpointError: the file is of another format, or does not fit the model.
    """
    if isinstance(path, nn.Module):
        raise TypeError(
            "`path` must come first and `model` second, but a model comes first: write "
            "`load_weights(path, model)`."
        )
    check_path("path", path)
    check_module("model", model)
    refuse_url(path)
    path = path_given(path)
    tensors = tensors_of(model)
    where = shown(path, 1000)
    weights = _read(path, where, bytes_at_most(model, strict=strict)[MODEL_FILE])
    # Buffers that no state dict holds; a checkpoint does.
    others = {name: buffer for name, buffer in model.named_buffers() if name not in tensors}
    targets = {**tensors, **others}
    for name, tensor in targets.items():
        if is_lazy(tensor) or tensor.is_meta:
            raise ValueError(
                f"the model must have memory for its weights, but `{shown(name)}` has none: run it "
                f"once on one batch if it has lazy layers, or make it outside of "
                f"`torch.device('meta')`."
            )
    found = _matched(targets, weights)
    found |= _tied(targets, found, weights)
    missing = [name for name in tensors if name not in found]
    foreign = sorted(weights.keys() - found.values())
    if path.is_dir():
        foreign = [name for name in foreign if not name.startswith(_NOT_OF_THE_MODEL)]
    if missing + foreign and (strict or not found):
        raise CheckpointError(_listed(where, missing, foreign, strict))
    _compare(where, targets, {name: weights[found[name]] for name in found}, strict)
    taken = {name: weights[there] for name, there in found.items() if name in tensors}
    usual = itertools.chain(
        model.named_parameters(remove_duplicate=False), model.named_buffers(remove_duplicate=False)
    )
    renames = not tensors.keys() <= {name for name, _ in usual}
    before = {name: each.detach().clone() for name, each in tensors.items()} if renames else {}
    if foreign_here := model.load_state_dict(taken, strict=False).unexpected_keys:
        with torch.no_grad():
            for name, value in before.items():
                tensors[name].copy_(value)
        raise CheckpointError(
            f"the model must take the names of its own `state_dict`, but takes no "
            f"`{shown(foreign_here[0])}`, which a hook may have renamed: let a hook of "
            f"`load_state_dict` rename it back."
        )
    with torch.no_grad():
        for name in found.keys() & others.keys():
            others[name].copy_(weights[found[name]])
    return missing, foreign


def _read(path: Path, where: str, at_most: int) -> dict[str, torch.Tensor]:
    if path.is_dir():
        return _from_safetensors(where, _read_checkpoint(path, where, {MODEL_FILE: at_most}))
    if not path.is_file():
        raise FileNotFoundError(
            f"`path` must name a file of weights, a checkpoint or a run directory, but "
            f"{where} is {'none of them' if path.exists() else 'not there'}."
        )
    check_size(where, path.stat().st_size, at_most)
    with path.open("rb") as file:
        held = Sealed.of(iter(lambda: file.read(CHUNK_BYTES), b""))
    start = held.read(0, 9)
    is_torch = start[:4] == b"PK\3\4" or start[:1] == b"\x80"  # a zip file, a pickle
    if is_torch and start[8:] != b"{":
        return _from_torch(where, held)
    return _from_safetensors(where, held)


def _read_checkpoint(path: Path, where: str, at_most: Mapping[str, int]) -> Sealed:
    if os.path.lexists(path / COMMIT):
        try:
            return read_folder(path, at_most, wanted=(MODEL_FILE,))[MODEL_FILE]
        except TooLargeError:
            raise
        except CheckpointError as error:
            raise CheckpointError(
                f"the checkpoint {where} must be whole, but is damaged "
                f"({str(error).removesuffix('.')}): pass the run directory, of which the newest "
                f"whole one is taken, or another path."
            ) from None
    data, _, passed_over = RunDirectory(path).newest(lambda files: files[MODEL_FILE], at_most)
    if data is None:
        seen = "; ".join(f"{entry.path.name}: {entry.trouble}" for entry in passed_over[:2])
        raise CheckpointError(
            f"{where} must be a run directory or a checkpoint's folder, but holds no whole "
            f"checkpoint{f' ({seen})' if seen else ''}: pass another path."
        )
    return data


def _from_safetensors(where: str, held: Sealed) -> dict[str, torch.Tensor]:
    try:
        return read_tensors(held)
    except Exception as error:
        raise CheckpointError(
            f"{where} must be a safetensors file or a state dict written by torch.save, but: "
            f"{_first_line(error)}."
        ) from None


def _from_torch(where: str, held: Sealed) -> dict[str, torch.Tensor]:
    """Read a state dict; torch's restricted unpickler runs no code."""
    try:
        said = torch.load(held.path, map_location=HOST, weights_only=True)
    except Exception as error:
        if isinstance(error, pickle.UnpicklingError) and "nsupported" in str(error):
            raise CheckpointError(
                f"{where} must hold nothing but tensors and plain values, but holds other "
                f"Python objects, and reading those can run any code: where you trust the file, "
                f"load it with torch and save `model.state_dict()` alone."
            ) from None
        raise CheckpointError(
            f"{where} must be a file written by torch.save, but: {_first_line(error)}."
        ) from None
    if not isinstance(said, Mapping):
        raise CheckpointError(
            f"{where} must hold a state dict, but holds a {type(said).__name__}: save "
            f"`model.state_dict()`."
        )
    weights = {
        str(key): value
        for key, value in said.items()
        # What modules give in `get_extra_state` has no place here.
        if isinstance(value, torch.Tensor) or not str(key).endswith("_extra_state")
    }
    others = [name for name, value in weights.items() if not _is_plain_tensor(value)]
    if others:
        raise CheckpointError(
            f"{where} must hold a state dict of dense tensors, but has other things, "
            f"{_first(others)}: load it with torch, and save the model's state dict alone."
        )
    return weights


def _is_plain_tensor(value: object) -> bool:
    return (
        isinstance(value, torch.Tensor)
        and value.layout == torch.strided
        and is_on_host(value)
        and not value.is_quantized
    )


def _matched(here: Collection[str], there: Collection[str]) -> dict[str, str]:
    """Return the file's name for each of the model's names; ignore wrappers if more match."""
    as_they_are = {name: name for name in here if name in there}
    home_of = {plain: name for name, plain in plain_names(there).items()}
    plain_here = plain_names(here)
    plain = {name: home_of[plain_here[name]] for name in here if plain_here[name] in home_of}
    return plain if len(plain) > len(as_they_are) else as_they_are


def _tied(
    targets: Mapping[str, torch.Tensor],
    found: Mapping[str, str],
    weights: Mapping[str, torch.Tensor],
) -> dict[str, str]:
    """Return, for tied tensors that the file lacks, the name under which it has them."""
    first: dict[object, str] = {}
    for name in found:
        other = first.setdefault(place_of(targets[name]), name)
        if not _is_same(weights[found[name]], weights[found[other]]):
            raise CheckpointError(
                f"`{shown(other)}` and `{shown(name)}` are one tensor in the model and must have "
                f"one value, but have two in the file: untie them in the model."
            )
    places = {name: place_of(tensor) for name, tensor in targets.items() if name not in found}
    return {name: found[first[place]] for name, place in places.items() if place in first}


def _is_same(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one is other:
        return True
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    raw = [tensor.contiguous().reshape(-1).view(torch.uint8) for tensor in (one, other)]
    return torch.equal(*raw)


def _compare(
    where: str, here: Mapping[str, torch.Tensor], there: Mapping[str, torch.Tensor], strict: bool
) -> None:
    for name, old in there.items():
        new = here[name]
        if old.shape != new.shape:
            raise CheckpointError(
                f"`{shown(name)}` must be of shape {tuple(old.shape)} as in {where}, but "
                f"is of shape {tuple(new.shape)}: make the model as it was, or pass other weights."
            )
        if old.dtype != new.dtype and strict:
            raise CheckpointError(
                f"`{shown(name)}` must be {old.dtype} as in {where}, but is {new.dtype}: "
                f"pass `strict=False` to convert it."
            )


def _listed(where: str, missing: list[str], foreign: list[str], strict: bool) -> str:
    advice = (
        "make the model as it was, or pass `strict=False` to load what has a name in both"
        if strict
        else "nothing has a name in both; pass other weights"
    )
    return (
        f"model and {where} must have the same names, but only the model has {_first(missing)}, "
        f"and only the file {_first(foreign)}: {advice}."
    )


def _first(names: list[str]) -> str:
    return named(names, _NAMES_AT_MOST) if names else "nothing"


def _first_line(error: Exception) -> str:
    return shown((str(error).splitlines() or [type(error).__name__])[0]).rstrip(".")


def plain_weights(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the model's state dict under plain names; tied tensors once, under the first name."""
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


def _save_as_torch(state: Mapping[str, Any], file: BinaryIO) -> None:
    try:
        torch.save(state, file)
    except RuntimeError as error:  # what torch makes of an OSError of the file
        at: BaseException | None = error
        while at is not None and not isinstance(at, OSError):
            at = at.__context__
        raise at or error from None


def save_weights(model: nn.Module, path: str | os.PathLike[str]) -> None:
    """Write the model's weights; a reader finds the old file or the whole new one.

    They are written as safetensors, or with `torch.save` where the name ends as its files do.
    """
    path = path_given(path)
    if path.is_dir():
        raise IsADirectoryError(
            f"`path` must name a file, but {shown(path, 1000)} is a folder: pass a file in it, "
            f"such as {shown(path / 'model.safetensors', 1000)}."
        )
    is_torchs = path.suffix in TORCHS_SUFFIXES
    for name, tensor in tensors_of(model).items():
        if not is_torchs and str(tensor.dtype) not in CODES:
            raise ValueError(
                f"weights must have a dtype that safetensors files support, but `{name}` is "
                f"{tensor.dtype}: convert it, or save to a file that ends in .pt."
            )
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with written_whole(path) as file:
            if is_torchs:
                _save_as_torch(_state_dict(model), file)
            else:
                file.write(to_safetensors(plain_weights(model)))
    except OSError as error:
        raise type(error)(
            f"`path` must name a file in a folder that can be made and written, but "
            f"{shown(path, 1000)} cannot be written ({error.strerror}): save elsewhere."
        ) from None


def _state_dict(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return a copy of the model's state dict under plain names; tied tensors appear twice."""
    tensors, copies = tensors_of(model), dict[object, torch.Tensor]()
    for tensor in tensors.values():
        if (place := place_of(tensor)) not in copies:
            copies[place] = tensor.detach().to(HOST, copy=True)
    plain = plain_names(tensors)
    return {plain[name]: copies[place_of(tensor)] for name, tensor in tensors.items()}


def tensors_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the tensors of the state dict by name; tied ones appear under each name."""
    named = model.state_dict(keep_vars=True)
    return {name: tensor for name, tensor in named.items() if isinstance(tensor, torch.Tensor)}


def plain_names(names: Collection[str]) -> dict[str, str]:
    """Return the names that tensors have in the unwrapped model.

    ``module`` is removed only if all names begin with it, and if all names stay distinct.
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
    """Identify a tensor by its memory, or by its object if it has no memory."""
    if is_lazy(tensor) or tensor.numel() == 0 or tensor.is_meta:
        return id(tensor)
    return tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.device
