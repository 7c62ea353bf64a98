"""Makes a module of the same structure that computes with other tensors.

As torch's ``replicate``, by the method of modules that is there for it: each module is copied, but
not what its attributes refer to. Tensors take the place of parameters under their names, and, other
than torch's, also in ``parameters()``.
"""

from __future__ import annotations

import types
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch.nn.parameter import is_lazy

_Module: Any = torch.nn.Module  # whose methods have no types


class Original:
    """A module, taken apart: what replicas are made of. Final.

    Attributes:
        module: the module.
        parts: all modules in it, itself first.
        parameters, buffers: all of them, each once.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        self.module, self.parts = module, [*module.modules()]
        self.parameters = _once(part._parameters for part in self.parts)
        self.buffers = _once(part._buffers for part in self.parts)

    def check(self, device: torch.device) -> None:
        """Refuse what cannot be replicated.

        Raises:
            ValueError: a part of it is compiled, or a script.
            RuntimeError: something is on another device, or has no shape yet.
        """
        refuse_compiled(self.module, self.parts)
        for tensor in (*self.parameters, *self.buffers):
            if is_lazy(tensor) or tensor.device != device:
                raise RuntimeError(self._wrong(tensor, device))

    def replicate(self, tensors: Mapping[int, torch.Tensor]) -> dict[int, torch.nn.Module]:
        """Make a replica of the module and of each part.

        Args:
            tensors: by the ``id`` of each parameter and buffer, what the replica has instead.

        Returns:
            The replicas, by the ``id`` of what they are a replica of.
        """
        copies = {id(part): _copied(part) for part in self.parts}
        for part in self.parts:
            copied = copies[id(part)]
            for name, child in part._modules.items():
                copied._modules[name] = None if child is None else copies[id(child)]
            for name, buffer in part._buffers.items():
                copied._buffers[name] = None if buffer is None else tensors[id(buffer)]
            for name, parameter in part._parameters.items():
                own = None if parameter is None else tensors[id(parameter)]
                _set_parameter(copied, name, own)
            forward = copied.__dict__.get("forward")
            if isinstance(forward, types.MethodType) and id(forward.__self__) in copies:
                bound = types.MethodType(forward.__func__, copies[id(forward.__self__)])
                copied.__dict__["forward"] = bound
        return copies

    def _wrong(self, tensor: torch.Tensor, device: torch.device) -> str:
        named = [*self.module.named_parameters(), *self.module.named_buffers()]
        name = next((name for name, each in named if each is tensor), "?")
        if is_lazy(tensor):
            return (
                f"Modules with uninitialized parameters can't be used with `DataParallel`, but "
                f"`{name}` has no shape yet: run a batch through the module before it is wrapped."
            )
        return (
            f"module must have its parameters and buffers on device {device} (device_ids[0]) "
            f"but found one of them on device: {tensor.device} (`{name}`). Move it there with "
            f"`module.to({str(device)!r})`."
        )


def refuse_compiled(module: torch.nn.Module, parts: Iterable[torch.nn.Module]) -> None:
    """Refuse a module of which a copy would compute with the original's tensors.

    Raises:
        ValueError: a part of it is compiled, or a script.
    """
    for part in parts:
        is_script = isinstance(part, torch.jit.ScriptModule)
        is_compiled = "_orig_mod" in part._modules or part.__dict__.get("_compiled_call_impl")
        if not is_script and not is_compiled:
            continue
        name = next((name for name, each in module.named_modules() if each is part), "")
        where = f"`{name}`" if name else "the module"
        if is_script:
            raise ValueError(
                f"a module must be Python's to be copied for each chunk, but {where} is a script: "
                f"pass the module that it was made of."
            )
        raise ValueError(
            f"a module must be wrapped before it is compiled, but {where} is compiled for the "
            f"tensors that it has: pass it as it was before `torch.compile`."
        )


def _once(groups: Iterable[Mapping[str, torch.Tensor | None]]) -> list[torch.Tensor]:
    found = {id(each): each for group in groups for each in group.values() if each is not None}
    return [*found.values()]


def _copied(part: Any) -> Any:
    kind: Any = type(part)
    if kind._replicate_for_data_parallel is not _Module._replicate_for_data_parallel:
        copied = part._replicate_for_data_parallel()
        copied.__dict__["_parameters"] = {}  # traced modules keep them
        return copied
    # What that method does; past `__setattr__`, which takes most of the time.
    copied = kind.__new__(kind)
    attributes = {**part.__dict__, "_parameters": {}, "_is_replica": True}
    attributes |= {name: attributes[name].copy() for name in ("_buffers", "_modules")}
    object.__setattr__(copied, "__dict__", attributes)
    return copied


def _set_parameter(module: torch.nn.Module, name: str, tensor: torch.Tensor | None) -> None:
    attributes: dict[str, Any] = module.__dict__
    if tensor is not None and type(module).__setattr__ is not _Module.__setattr__:
        setattr(module, name, tensor)  # RNNs keep parameters in lists of their own, too
        attributes.pop(name, None)
    attributes["_parameters"][name] = tensor
