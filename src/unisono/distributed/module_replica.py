"""Creates a module of the same structure that computes with other tensors.

Like torch's ``replicate``, this uses the method of modules for that purpose: each module is copied,
but not the objects that its attributes refer to. Tensors replace parameters under their
names and, unlike torch's, also in ``parameters()``.

Each chunk gets its own alias of the module's tensors. A fork has two halves for each tensor, so
that forks make the tree of :mod:`unisono.plan.summation`, and a backward pass its additions::

                weight                       on the first device
              ┌───┴────┐
            [0,2)    [2,3)                   a chunk's alias lies on the chunk's device
            ┌─┴─┐      │
    chunk   0   1      2
    device  a   a      b                     g = (g₀ + g₁) + g₂, the first sum on device a

Each sum is computed on the device of its first chunk, so devices only exchange sums of their
sub-trees. An alias shares memory and version counter with its tensor.

Autograd has one thread per device. A chunk's outputs pass through one gate, so that its backward
pass begins once all their gradients have arrived: otherwise the order of summation could depend on
the devices' speed.
"""

from __future__ import annotations

import functools
import threading
import types
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, final

import torch
from torch.nn.parameter import is_lazy

from unisono.distributed.chunks import tensors_in
from unisono.plan.summation import Node
from unisono.runtime.arrivals import changed_within

_Module: Any = torch.nn.Module  # which is untyped


@final
class Original:
    """A module with its parts and tensors, from which replicas are made."""

    def __init__(self, module: torch.nn.Module) -> None:
        self.module, self.parts = module, [*module.modules()]
        self.parameters = _once(part._parameters for part in self.parts)
        self.buffers = _once(part._buffers for part in self.parts)

    def check(self, device: torch.device) -> None:
        """Raise if the module cannot be replicated."""
        refuse_compiled(self.module, self.parts)
        for tensor in (*self.parameters, *self.buffers):
            if is_lazy(tensor) or tensor.device != device:
                raise RuntimeError(self._wrong(tensor, device))

    def replicate(self, tensors: Mapping[int, torch.Tensor]) -> dict[int, torch.nn.Module]:
        """Return a replica of each part of the module, by the ``id`` of the part.

        `tensors`: by the ``id`` of each parameter and buffer, its replacement in the replica.
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
    """Raise if a copy of a module would compute with the original's tensors."""
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
            f"tensors it had then: wrap the original module."
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
    # Same as that method, but bypassing `__setattr__`, which takes most of the time.
    copied = kind.__new__(kind)
    attributes = {**part.__dict__, "_parameters": {}, "_is_replica": True}
    attributes |= {name: attributes[name].copy() for name in ("_buffers", "_modules")}
    object.__setattr__(copied, "__dict__", attributes)
    return copied


def _set_parameter(module: torch.nn.Module, name: str, tensor: torch.Tensor | None) -> None:
    attributes: dict[str, Any] = module.__dict__
    if tensor is not None and type(module).__setattr__ is not _Module.__setattr__:
        setattr(module, name, tensor)  # RNNs also keep parameters in lists
        attributes.pop(name, None)
    attributes["_parameters"][name] = tensor


Tensors = tuple[torch.Tensor, ...]


def aliases(
    tensors: Sequence[torch.Tensor],
    devices: Sequence[torch.device],
    copies: Mapping[torch.device, Sequence[torch.Tensor]],
) -> list[Tensors]:
    """Return for each chunk an alias of each tensor that takes gradients, on the chunk's device.

    The tensors are on the first device; `copies` are on the others.
    """

    if len(devices) == 1:  # so that a call's gradients are summed before those of other calls
        return [_PASS.apply(*tensors)]
    return _aliases(Node(0, len(devices)), tuple(tensors), devices, copies)


def _aliases(
    node: Node,
    here: Tensors,
    devices: Sequence[torch.device],
    copies: Mapping[torch.device, Sequence[torch.Tensor]],
) -> list[Tensors]:
    if node.hi - node.lo == 1:
        return [here]
    left, right = node.children()
    there = here if devices[left.lo] == devices[right.lo] else copies[devices[right.lo]]
    both: Tensors = _FORK.apply(tuple(tensor.detach() for tensor in there), *here)
    return [
        *_aliases(left, both[: len(here)], devices, copies),
        *_aliases(right, both[len(here) :], devices, copies),
    ]


def through_gate(output: Any) -> Any:
    """Delay a chunk's backward pass until the gradients of all its output tensors have arrived."""
    tensors = [tensor for _, tensor in tensors_in(output) if tensor.requires_grad]
    if not tensors:
        return output
    passed = dict(zip(map(id, tensors), _GATE.apply(*tensors), strict=True))
    return changed_within(output, lambda part: passed.get(id(part)))


class _Fork(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, there: Tensors, *here: torch.Tensor) -> Tensors:
        ctx.set_materialize_grads(False)
        ctx.home = here[0].device
        return (*(tensor.detach() for tensor in here), *there)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        half = len(gradients) // 2
        pairs = zip(gradients[:half], gradients[half:], strict=True)
        return (None, *(_sum(left, right, ctx.home) for left, right in pairs))


class _Pass(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *tensors: torch.Tensor) -> Tensors:
        ctx.set_materialize_grads(False)
        return tuple(tensor.detach() for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        return gradients


class _Gate(_Pass):
    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        _host_generator().put_back_after_this_pass()
        return gradients


def _sum(
    left: torch.Tensor | None, right: torch.Tensor | None, home: torch.device
) -> torch.Tensor | None:
    """Add the gradients that exist, on the device of the fork's tensors."""
    if right is None:
        return left
    right = right.to(home, non_blocking=True)
    if left is None:
        return right
    if left.is_sparse and right.is_sparse:
        return (left.coalesce() + right.coalesce()).coalesce()
    return right + left if left.is_sparse else left + right


_FORK: Any = _Fork  # `apply` is untyped
_PASS: Any = _Pass
_GATE: Any = _Gate


@final
class _HostGenerator:
    """Restores torch's CPU generator after a backward pass.

    Activation checkpoints set it, recompute their region, and restore it. If two devices recompute
    regions at the same time, one could restore what the other has set.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._passes: set[int] = set()

    def put_back_after_this_pass(self) -> None:
        number = torch._C._current_graph_task_id()
        with self._lock:
            if number in self._passes:
                return
            self._passes.add(number)
            state = torch.default_generator.get_state()

        def put_back() -> None:
            torch.default_generator.set_state(state)
            self._passes.discard(number)

        engine: Any = torch.autograd.Variable._execution_engine
        engine.queue_callback(put_back)


@functools.cache
def _host_generator() -> _HostGenerator:
    return _HostGenerator()
