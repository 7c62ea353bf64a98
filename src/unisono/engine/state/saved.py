"""The contents of a checkpoint's files, and how model and optimizer load them.

::

    model.safetensors       NAME of a parameter or buffer
    optimizer.safetensors   KEY/NAME of the optimizer  │  run.state/KEY of the program
    run.json                format, position, identity, groups, numbers, modes, strides, state, last

Only values are saved: tensors in safetensors, numbers and strings in JSON. Every name, shape and
dtype is compared with the model's and the optimizer's before anything is changed.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from torch import nn
from torch.optim import Optimizer

from unisono.engine.state.contents import is_dense, named_parameters, updated_parameters
from unisono.engine.state.optimizer_state import NO_OPTIONS, join_state, put_back_state
from unisono.engine.state.packing import unpack_number
from unisono.errors import CheckpointError
from unisono.runtime.checkpoint.folder import MODEL_FILE, OPTIMIZER_FILE, RUN_FILE
from unisono.runtime.checkpoint.sealed import Sealed
from unisono.runtime.device import HOST
from unisono.runtime.notices import named, shown

FORMAT = 1  # of run.json

OTHERWISE = 'make the model as it was, or pass another `directory` or `Checkpoint(resume="never")`'

_OPTIONAL = ("state", "last", "strides", "modes", "given")  # older versions did not write them
_OBJECTS = ("position", "identity", "numbers", *_OPTIONAL)
_TIMES = 16  # a wider dtype, buffers that are gone, a larger model of the same kind
_BESIDES = 1 << 30  # names, and small models


@dataclass(frozen=True, slots=True)
class CheckpointData:
    """A checkpoint in memory; tensors are views of its files, each worker's own where changed."""

    tensors: dict[str, torch.Tensor]  # parameters and buffers by name
    # the optimizer's tensors, by `KEY/PARAMETER`, and those of `run.state`
    others: dict[str, torch.Tensor]
    # the rest: position, identity, hyperparameters, numbers of the optimizer's state, the plain
    # values of `run.state`, what the last step said, strides of those tensors above that do not
    # lie row by row, which parameters were fixed and which layers evaluated
    facts: dict[str, Any]
    files: Mapping[str, Sealed]  # what it was read from

    @classmethod
    def from_files(cls, files: Mapping[str, Sealed]) -> CheckpointData:
        """Read a checkpoint from its three files; raise CheckpointError if one is malformed."""
        facts = facts_in(files[RUN_FILE])
        try:
            tensors = read_tensors(files[MODEL_FILE])
            others = read_tensors(files[OPTIMIZER_FILE])
        except Exception as error:
            raise _malformed(error) from None
        for name in facts["strides"].keys() & others.keys():
            others[name] = _laid_out(name, others[name], facts["strides"][name])
        return cls(tensors, others, facts, files)


def facts_in(file: Sealed) -> dict[str, Any]:
    """Return the facts of a checkpoint's run file; raise CheckpointError if it is malformed."""
    try:
        facts = json.loads(b"".join(file))
    except Exception as error:
        raise _malformed(error) from None
    if isinstance(facts, dict):
        facts = {name: {} for name in _OPTIONAL} | facts
    _check_facts(facts)
    return dict(facts)


def _malformed(error: Exception) -> CheckpointError:
    return CheckpointError(f"its files must have their formats, but: {shown(error)}.")


def read_tensors(file: Sealed) -> dict[str, torch.Tensor]:
    """View the tensors of a safetensors file; changing one does not change the file."""
    with safe_open(file.path, "pt") as opened:
        return {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118


def bytes_at_most(model: nn.Module, *, strict: bool = True) -> dict[str, int]:
    """Return the largest size accepted for each file of a checkpoint, in bytes.

    A file may be mostly holes, which take hours to read. The bounds are far above any need, so that
    a file of a different model is still read and its differences are listed.
    """
    in_memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    num_bytes = sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))
    needed = _TIMES * num_bytes + _BESIDES
    return {
        MODEL_FILE: min(needed, in_memory) if strict else in_memory,
        OPTIMIZER_FILE: in_memory,
        RUN_FILE: min(_BESIDES, in_memory),
    }


def apply(
    snapshot: CheckpointData, model: nn.Module, optimizer: Optimizer, *, lends: bool = False
) -> None:
    """Load a snapshot into model and optimizer, or raise CheckpointError and change neither.

    If it `lends`, the optimizer's tensors are views of the snapshot's files.
    """
    check_fits(snapshot, model, optimizer)
    there = {**named_parameters(model, optimizer), **dict(model.named_buffers())}
    parameters = updated_parameters(model, optimizer)
    numbers = snapshot.facts["numbers"]
    states = join_state(snapshot.others, numbers, parameters, copies=not lends)
    check_groups(snapshot.facts["groups"], optimizer)
    with torch.no_grad():
        for name, tensor in there.items():
            tensor.copy_(snapshot.tensors[name])
    optimizer.state.clear()
    put_back_state(optimizer, parameters, states)
    apply_groups(snapshot.facts["groups"], optimizer)
    apply_modes(snapshot.facts["modes"], model, optimizer)


def apply_groups(
    groups: list[dict[str, Any]], optimizer: Optimizer, *, exactly: bool = False
) -> None:
    """Load options into groups, or raise CheckpointError and change none.

    A checkpoint may lack options of a newer torch, which stay; `exactly`: other options go.
    """
    check_groups(groups, optimizer)
    for group, values in zip(optimizer.param_groups, groups, strict=True):
        for key in group.keys() - values.keys() - NO_OPTIONS if exactly else ():
            del group[key]
        for key, value in values.items():
            if key != "params":
                # The program may have added others while it ran.
                group[key] = _of_kind(group.get(key), value)


def _of_kind(here: Any, value: Any) -> Any:
    """Return a value, checked to be alike, as the kind of the present one; tensors are filled."""
    value = unpack_number(value)
    if isinstance(here, torch.Tensor):
        return here.fill_(value)
    if isinstance(here, (list, tuple)):
        are_alike = len(here) == len(value)
        return type(here)(map(_of_kind, here, value) if are_alike else value)
    return value


def _check_facts(facts: Any) -> None:
    if not isinstance(facts, dict) or facts.get("format") != FORMAT:
        raise CheckpointError(f"run.json must have format {FORMAT}, but has not.")
    if (
        not all(isinstance(facts.get(name), dict) for name in _OBJECTS)
        or not isinstance(facts.get("groups"), list)
        or not all(isinstance(one, dict) for one in [*facts["groups"], *facts["numbers"].values()])
        or facts["position"].keys() != {"step", "epoch", "batch"}
        or not all(type(n) is int and 0 <= n < 2**62 for n in facts["position"].values())
        or facts["modes"].keys() not in (set(), {"fixed", "evaluating"})
        or not all(isinstance(names, list) for names in facts["modes"].values())
        or not all(isinstance(name, str) for names in facts["modes"].values() for name in names)
    ):
        raise CheckpointError("run.json must have the form that this version writes, but has not.")


def _laid_out(name: str, tensor: torch.Tensor, stride: Any) -> torch.Tensor:
    """Copy a tensor into the strides of a file, which must not need more memory."""
    if (
        not isinstance(stride, list)
        or not all(type(step) is int and 0 <= step < 2**62 for step in stride)
        or len(stride) != tensor.ndim
        or not is_dense(tensor.shape, stride)
    ):
        raise CheckpointError(
            f"the strides of `{shown(name)}` must put its shape {tuple(tensor.shape)} into one "
            f"block of memory, but are {stride!r:.80}."
        )
    empty = torch.empty_strided(tensor.shape, stride, dtype=tensor.dtype, device=HOST)
    return empty.copy_(tensor)


def check_groups(groups: list[dict[str, Any]], optimizer: Optimizer) -> None:
    """Raise CheckpointError if options do not fit an optimizer; see :func:`apply_groups`."""
    if len(groups) != len(optimizer.param_groups):
        raise CheckpointError(
            f"the optimizer must have {len(groups)} parameter groups as in the checkpoint, but has "
            f"{len(optimizer.param_groups)}: before the first loop, add those that were added "
            f'until then, or pass another `directory` or `Checkpoint(resume="never")`.'
        )
    for number, (group, values) in enumerate(zip(optimizer.param_groups, groups, strict=True)):
        for key, value in values.items():
            if key in group and key != "params" and not _is_alike(group[key], value):
                raise CheckpointError(
                    f"`{key}` of parameter group {number} must be {value!r:.80} as in the "
                    f"checkpoint, but is {group[key]!r:.80}, which is of another kind."
                )


def _is_alike(here: Any, value: Any) -> bool:
    """Return whether an option may be set to a value; None and numbers are interchangeable."""
    value = unpack_number(value)
    if isinstance(here, torch.Tensor):
        return _is_number(value)
    if isinstance(here, (list, tuple)):
        return (
            isinstance(value, list) and len(here) == len(value) and all(map(_is_alike, here, value))
        )
    if isinstance(here, Mapping):
        return isinstance(value, dict) and here.keys() == value.keys()
    if isinstance(here, str):
        return isinstance(value, str)
    if value is None:
        return here is None or isinstance(here, bool)
    return (here is None or _is_number(here)) and _is_number(value)


def _is_number(value: Any) -> bool:
    if isinstance(value, (float, np.number, np.bool_)):
        return True
    return isinstance(value, int) and abs(value) < 1 << 63


def check_fits(snapshot: CheckpointData, model: nn.Module, optimizer: Optimizer) -> None:
    """Raise one CheckpointError that lists all differences to a model and its optimizer."""
    here = {**named_parameters(model, optimizer), **dict(model.named_buffers())}
    there = snapshot.tensors
    missing, foreign = sorted(here.keys() - there.keys()), sorted(there.keys() - here.keys())
    differ = []
    if missing or foreign:
        differ.append(
            f"{named(missing) or 'none'} are only in the model and {named(foreign) or 'none'} only "
            f"in the checkpoint"
        )
    others = [
        f"`{shown(name)}` is {_form(there[name])} in the checkpoint and {_form(tensor)} now"
        for name, tensor in here.items()
        if name in there and _form(there[name]) != _form(tensor)
    ]
    differ += others[:_NAMES_AT_MOST]
    if len(others) > _NAMES_AT_MOST:
        differ.append(f"{len(others) - _NAMES_AT_MOST} more have other shapes")
    groups = len(snapshot.facts["groups"]), len(optimizer.param_groups)
    if differ and groups[0] != groups[1]:  # alone it has a separate remedy
        differ.append(f"the optimizer had {groups[0]} parameter groups and has {groups[1]} now")
    if differ:
        raise CheckpointError(
            f"the model must have the checkpoint's tensors, but {'; '.join(differ)}: {OTHERWISE}."
        )


def _form(tensor: torch.Tensor) -> str:
    return f"{tensor.dtype} of shape {tuple(tensor.shape)}"


_NAMES_AT_MOST = 3  # in a message


def modes_of(model: nn.Module, optimizer: Optimizer) -> dict[str, list[str]]:
    """Return the names of fixed parameters and of layers in `eval()`, as plain JSON."""
    named = named_parameters(model, optimizer)
    return {
        "fixed": [name for name, parameter in named.items() if not parameter.requires_grad],
        "evaluating": [name for name, module in model.named_modules() if not module.training],
    }


def describe_modes(model: nn.Module, optimizer: Optimizer) -> dict[str, str]:
    """Describe the result of :func:`modes_of` in a few words that identify it."""
    modes = modes_of(model, optimizer)
    return {
        "the parameters with `requires_grad=False`": _listed(modes["fixed"]),
        "the layers in `eval()`": _listed(modes["evaluating"]),
    }


def apply_modes(modes: dict[str, Any], model: nn.Module, optimizer: Optimizer) -> None:
    """Set parameters and layers to the result of :func:`modes_of`; if empty, do nothing."""
    if not modes:
        return
    fixed, evaluating = set(modes["fixed"]), set(modes["evaluating"])
    for name, parameter in named_parameters(model, optimizer).items():
        if parameter.requires_grad == (name in fixed):
            parameter.requires_grad_(name not in fixed)
    for name, module in model.named_modules():
        if module.training == (name in evaluating):
            module.training = name not in evaluating


def _listed(names: list[str]) -> str:
    if len(names) <= _NAMES_AT_MOST:
        return ", ".join(f"`{name or 'model'}`" for name in names) or "none"
    digest = hashlib.sha256("\n".join(names).encode()).hexdigest()[:8]
    return f"`{names[0] or 'model'}` to `{names[-1]}` ({len(names)}, {digest})"
