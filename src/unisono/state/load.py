"""Load weights from a file into a model, whoever wrote them, under whatever wrapper.

Names that differ only in what DDP and ``torch.compile`` put before them are the same. Only values
are read, and a model is changed only when all of them fit.
"""

from __future__ import annotations

import io
import itertools
import os
import pickle
from collections.abc import Collection, Mapping
from pathlib import Path

import torch
from safetensors.torch import load as from_safetensors
from torch import nn
from torch.nn.parameter import is_lazy

from unisono.checkpoint.folder import COMMIT, MODEL_FILE, TooLargeError, check_size, read_folder
from unisono.checkpoint.run_directory import RunDirectory
from unisono.device import HOST, is_on_host
from unisono.errors import CheckpointError
from unisono.notices import named, shown
from unisono.state.saved import bytes_at_most
from unisono.state.weights import place_of, plain_names, tensors_of

_NAMES_AT_MOST = 4  # in a message
_NOT_OF_THE_MODEL = "optimizer."  # parameters that only the optimizer of a checkpoint's run has


def load_model(
    path: str | os.PathLike[str], model: nn.Module, *, strict: bool = True
) -> tuple[list[str], list[str]]:
    """Give a model the weights of a file, or leave it as it is.

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
    path = Path(path)
    tensors = tensors_of(model)
    where = shown(path, 1000)
    weights = _read(path, where, bytes_at_most(model, strict=strict)[MODEL_FILE])
    # Buffers that no state dict holds; a checkpoint does.
    others = {name: buffer for name, buffer in model.named_buffers() if name not in tensors}
    targets = {**tensors, **others}
    if path.is_dir():
        weights = _named_by_hooks(model, targets, weights)
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
        raise CheckpointError(_told_names(where, missing, foreign, strict))
    _compare(where, targets, {name: weights[found[name]] for name in found}, strict)
    model.load_state_dict(
        {name: weights[there] for name, there in found.items() if name in tensors}, strict=False
    )
    with torch.no_grad():
        for name in found.keys() & others.keys():
            others[name].copy_(weights[found[name]])
    return missing, foreign


def _read(path: Path, where: str, at_most: int) -> dict[str, torch.Tensor]:
    """Read whatever `path` is; `where` is its name for messages."""
    if path.is_dir():
        return _from_safetensors(where, _read_checkpoint(path, where, {MODEL_FILE: at_most}))
    if not path.is_file():
        raise FileNotFoundError(
            f"`path` must name a file of weights, a checkpoint or a run directory, but "
            f"{where} is {'none of them' if path.exists() else 'not there'}."
        )
    check_size(where, path.stat().st_size, at_most)
    data = path.read_bytes()
    is_torch = data[:4] == b"PK\3\4" or data[:1] == b"\x80"  # a zip file, a pickle
    if is_torch and data[8:9] != b"{":
        return _from_torch(where, data)
    return _from_safetensors(where, data)


def _read_checkpoint(path: Path, where: str, at_most: Mapping[str, int]) -> bytes:
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


def _from_safetensors(where: str, data: bytes) -> dict[str, torch.Tensor]:
    try:
        return from_safetensors(data)
    except Exception as error:
        raise CheckpointError(
            f"{where} must be a safetensors file or a state dict written by torch.save, but: "
            f"{_first_line(error)}."
        ) from None


def _from_torch(where: str, data: bytes) -> dict[str, torch.Tensor]:
    """Read a state dict; torch's restricted unpickler runs no code."""
    try:
        said = torch.load(io.BytesIO(data), map_location=HOST, weights_only=True)
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
            f"{where} must hold a state dict of dense tensors, but {_first(others)} "
            f"{'are' if len(others) > 1 else 'is'} something else: load it with torch, and save "
            f"the model's state dict alone."
        )
    return weights


def _is_plain_tensor(value: object) -> bool:
    return (
        isinstance(value, torch.Tensor)
        and value.layout == torch.strided
        and is_on_host(value)
        and not value.is_quantized
    )


def _named_by_hooks(
    model: nn.Module, targets: Mapping[str, torch.Tensor], weights: dict[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Rename a checkpoint's weights as the model's state dict hooks do."""
    plain_here = plain_names(targets)
    names = {id(tensor): plain_here[name] for name, tensor in targets.items()}
    own = dict(itertools.chain(model.named_parameters(), model.named_buffers()))
    plain_own, plain_there = plain_names(own), plain_names(weights)
    hooked = {
        plain_own[name]: names[id(tensor)]
        for name, tensor in own.items()
        if id(tensor) in names and targets.get(name) is not tensor
    }
    if not hooked:
        return weights
    return {hooked.get(name, name): weights[there] for there, name in plain_there.items()}


def _matched(here: Collection[str], there: Collection[str]) -> dict[str, str]:
    """Find the file's name for each of the model's: the same, or the same without wrappers."""
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
    """Find, for names of tied tensors that the file lacks, the name that it has.

    Raises:
        CheckpointError: a tensor was saved under two names, with different values.
    """
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
    where: str,
    here: Mapping[str, torch.Tensor],
    there: Mapping[str, torch.Tensor],
    strict: bool,
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


def _told_names(where: str, missing: list[str], foreign: list[str], strict: bool) -> str:
    advice = (
        "make the model as it was, or pass `strict=False` to load what has a name in both"
        if strict
        else "nothing has a name in both; pass other weights"
    )
    return (
        f"model and {where} must have the same names, but {_first(missing)} "
        f"{'are' if len(missing) > 1 else 'is'} only in the model and {_first(foreign)} only in "
        f"the file: {advice}."
    )


def _first(names: list[str]) -> str:
    return named(names, _NAMES_AT_MOST) if names else "nothing"


def _first_line(error: Exception) -> str:
    return shown((str(error).splitlines() or [type(error).__name__])[0]).rstrip(".")
