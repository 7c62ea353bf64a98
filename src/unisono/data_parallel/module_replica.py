"""Makes a module of the same structure that computes with other tensors.

As torch's ``replicate``, by the method of modules that is there for it: each module is copied, but
not what its attributes refer to. Tensors take the place of parameters under their names, and, other
than torch's, also in ``parameters()``.
"""

from __future__ import annotations

import types
from collections.abc import Mapping
from itertools import chain
from typing import Any

import torch
from torch.nn.parameter import is_lazy


def refuse_what_has_no_replicas(module: torch.nn.Module) -> None:
    """Refuse modules of which a copy would compute with the original's tensors.

    Raises:
        ValueError: a part of it is compiled, or a script.
    """
    for name, part in module.named_modules():
        where = f"`{name}`" if name else "the module"
        if "_orig_mod" in part._modules or part.__dict__.get("_compiled_call_impl") is not None:
            raise ValueError(
                f"a module must be wrapped before it is compiled, but {where} is compiled for the "
                f"tensors that it has: pass it as it was before `torch.compile`."
            )
        if isinstance(part, torch.jit.ScriptModule):
            raise ValueError(
                f"a module must be Python's to be copied for each chunk, but {where} is a script: "
                f"pass the module that it was made of."
            )


def refuse_other_devices(module: torch.nn.Module, device: torch.device) -> None:
    """Refuse a module of which something is on another device, or nowhere yet.

    Raises:
        RuntimeError: it is, or has no shape yet, as lazy modules have.
    """
    for name, tensor in chain(module.named_parameters(), module.named_buffers()):
        if is_lazy(tensor):
            raise RuntimeError(
                f"Modules with uninitialized parameters can't be used with `DataParallel`, but "
                f"`{name}` has no shape yet: run a batch through the module before it is wrapped."
            )
        if tensor.device != device:
            raise RuntimeError(
                f"module must have its parameters and buffers on device {device} (device_ids[0]) "
                f"but found one of them on device: {tensor.device} (`{name}`). Move it there with "
                f"`module.to({str(device)!r})`."
            )


def replicate(
    module: torch.nn.Module, tensors: Mapping[int, torch.Tensor]
) -> dict[int, torch.nn.Module]:
    """Make a replica of a module and of each module in it.

    Args:
        module: of any structure; modules and tensors may be shared within it.
        tensors: by the ``id`` of each parameter and buffer, what the replica has instead.

    Returns:
        The replicas, by the ``id`` of what they are a replica of.
    """
    parts = [*module.modules()]
    copies = {id(part): _copied(part) for part in parts}
    for part in parts:
        copied = copies[id(part)]
        for name, child in part._modules.items():
            copied._modules[name] = None if child is None else copies[id(child)]
        for name, buffer in part._buffers.items():
            copied._buffers[name] = None if buffer is None else tensors[id(buffer)]
        for name, parameter in part._parameters.items():
            if parameter is None:
                copied._parameters[name] = None
            else:
                _set_parameter(copied, name, tensors[id(parameter)])
        forward = copied.__dict__.get("forward")
        if isinstance(forward, types.MethodType) and id(forward.__self__) in copies:
            bound = types.MethodType(forward.__func__, copies[id(forward.__self__)])
            copied.__dict__["forward"] = bound
    return copies


def _copied(part: torch.nn.Module) -> torch.nn.Module:
    copied: torch.nn.Module = part._replicate_for_data_parallel()  # type: ignore[no-untyped-call]
    copied.__dict__["_parameters"] = {}  # traced modules keep them
    return copied


def _set_parameter(module: torch.nn.Module, name: str, tensor: torch.Tensor) -> None:
    # First as torch does, for modules that keep parameters in lists of their own (RNNs).
    setattr(module, name, tensor)
    attributes: dict[str, Any] = module.__dict__
    attributes.pop(name, None)
    attributes["_parameters"][name] = tensor
