"""Name the tensors of model and optimizer, which make up a run, and check them beforehand."""

from __future__ import annotations

import hashlib
import itertools
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from unisono.engine.state.optimizer_state import move_state, named_states, overlapping
from unisono.engine.state.optimizers import check_optimizer, is_elementwise, kind_of
from unisono.engine.state.packing import tensors_in
from unisono.runtime.device import HOST, Device, in_rows, is_on_host

_ADDRESS = re.compile(" at 0x[0-9a-f]+")


def named_parameters(model: nn.Module, optimizer: Optimizer) -> dict[str, nn.Parameter]:
    """Return all parameters of the model and the optimizer by name, tied ones once.

    The model's come first, under its own names; others are ``optimizer.GROUP.POSITION``.
    """
    named = dict(model.named_parameters())
    seen = {id(parameter) for parameter in named.values()}
    for number, group in enumerate(optimizer.param_groups):
        for position, parameter in enumerate(group["params"]):
            if id(parameter) not in seen:
                seen.add(id(parameter))
                named[f"optimizer.{number}.{position}"] = parameter
    return named


def updated_parameters(model: nn.Module, optimizer: Optimizer) -> dict[str, nn.Parameter]:
    """Return the parameters that the optimizer updates, by name, in the model's order."""
    updated, named = _updated(optimizer), named_parameters(model, optimizer)
    return {name: parameter for name, parameter in named.items() if id(parameter) in updated}


def _updated(optimizer: Optimizer) -> set[int]:
    return {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}


def check_module(argument: str, given: Any) -> None:
    """Raise TypeError, with a remedy, if the argument is not a module."""
    if isinstance(given, nn.Module):
        return
    seen = f"is of type {type(given).__name__}"
    remedy = "pass the model itself"
    if isinstance(given, type):
        seen, remedy = f"is the class {given.__name__}", f"make one, as `{given.__name__}()`"
    elif isinstance(given, str | os.PathLike):
        seen, remedy = f"is {str(given)!r}", "make the model, then `unisono.load_weights` into it"
    elif isinstance(given, list | tuple):
        remedy = "pass one module, such as `nn.Sequential(*layers)`"
    raise TypeError(f"`{argument}` must be a torch.nn.Module, but {seen}: {remedy}.")


def check_contents(model: nn.Module, optimizer: Optimizer, device: Device) -> None:
    """Raise an error, before any training, for what cannot be trained on a device."""
    check_module("model", model)
    check_unwrapped(model)
    check_optimizer(optimizer, on_host=device.is_host)
    named = named_parameters(model, optimizer)
    for name, parameter in named.items():
        _check_tensor("parameter", name, parameter, device)
    buffers = dict(model.named_buffers())
    for name, buffer in buffers.items():
        _check_tensor("buffer", name, buffer, device)
    _check_apart({**named, **buffers})
    if not {id(parameter) for parameter in model.parameters()} & _updated(optimizer):
        raise ValueError(
            "the optimizer must update parameters of the model, but updates none of them: make it "
            "from `model.parameters()`, after the last change to the model's layers."
        )
    for name, module in model.named_modules():
        if getattr(module, "sparse", False) is True:
            raise ValueError(
                f"gradients must be dense, but `{name or 'model'}` ({type(module).__name__}) has "
                f"`sparse=True`: make it with `sparse=False`; the sums are the same."
            )
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.max_norm is not None:
            raise ValueError(
                f"parameters must be changed by the optimizer alone, but `{name or 'model'}` "
                f"({type(module).__name__}) has `max_norm={module.max_norm}`, with which each "
                f"forward pass scales rows in place: leave it out, and scale what is looked up."
            )


def signature(model: nn.Module, optimizer: Optimizer) -> str:
    """Hash names, shapes, dtypes and the optimizer's kind and options, for workers to compare."""
    lines = [f"{kind_of(optimizer)} {is_elementwise(optimizer)}"]
    names = {id(p): name for name, p in named_parameters(model, optimizer).items()}
    for group in optimizer.param_groups:
        options = sorted((key, str(value)) for key, value in group.items() if key != "params")
        line = f"{options} {[names[id(parameter)] for parameter in group['params']]}"
        lines.append(_ADDRESS.sub("", line))
    for name, parameter in named_parameters(model, optimizer).items():
        lines.append(f"{name} {tuple(parameter.shape)} {parameter.dtype}")
    for name, buffer in model.named_buffers():
        lines.append(f"{name} {tuple(buffer.shape)} {buffer.dtype}")
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]


def _check_apart(named: Mapping[str, torch.Tensor]) -> None:
    if pair := overlapping(named):
        raise ValueError(
            f"parameters and buffers must be the same object or lie apart, but `{pair[0]}` and "
            f"`{pair[1]}` are two objects over the same memory: tie parameters with "
            f"`a.weight = b.weight`; of two buffers keep one, or register a `.clone()`."
        )


def place(model: nn.Module, optimizer: Optimizer, device: Device) -> None:
    """Move the model, other parameters of the optimizer, and its state to a device.

    Parameters stay the same objects, since the optimizer refers to them.
    """
    others = [p for p in updated_parameters(model, optimizer).values() if not device.has(p)]
    if not others and all(map(device.has, (*model.parameters(), *model.buffers()))):
        move_state(optimizer)
        return  # as it is, with its hooks: where objects are swapped, those would be lost
    if not all(map(device.has, (*model.parameters(), *model.buffers()))):
        move_in_place(model, device.torch)
    for parameter in others:
        if not device.has(parameter):
            move_in_place(nn.ParameterList([parameter]), device.torch)
    if not all(map(device.has, updated_parameters(model, optimizer).values())):
        raise ValueError(
            "an optimizer must have the model's parameters, but moving the model has replaced "
            "them: move the model first, then make the optimizer."
        )
    move_state(optimizer)


def move_in_place(module: nn.Module, device: torch.device) -> None:
    """Move a module to a device; its parameters stay the same objects."""
    is_swapped = torch.__future__.get_swap_module_params_on_conversion()
    # Where a tensor there cannot take the place of one of the host, the objects are swapped.
    is_compatible = torch._has_compatible_shallow_copy_type(
        torch.empty(0, device=HOST), torch.empty(0, device=device)
    )
    for name, parameter in module.named_parameters() if not is_compatible else ():
        if parameter._backward_hooks or parameter._post_accumulate_grad_hooks:
            raise ValueError(
                f"hooks of parameters must be registered where the parameters stay, but moving "
                f"`{name}` to {device} would lose its hooks: call `model.to('{device}')` first."
            )
    torch.__future__.set_swap_module_params_on_conversion(is_swapped or not is_compatible)
    try:
        module.to(device)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(is_swapped)


def _check_tensor(kind: str, name: str, tensor: torch.Tensor, device: Device) -> None:
    if is_lazy(tensor):
        raise ValueError(
            f"{kind}s must have their shape before training, but `{name}` is lazy: run the model "
            f"once on one batch, then make the optimizer."
        )
    if not (is_on_host(tensor) or device.has(tensor)):
        where = "the CPU" if device.is_host else f"the CPU or on this worker's {device.name}"
        raise ValueError(
            f"the model must be on {where}, but {kind} `{name}` is on {tensor.device}: leave out "
            f"`.to(...)` and `.cuda()`; `device` says where it is computed, and it is moved there."
        )
    if tensor.layout != torch.strided or not is_dense(tensor.shape, tensor.stride()):
        raise ValueError(
            f"{kind}s must be dense and not overlap themselves, but `{name}` has strides "
            f"{tensor.stride() if tensor.layout == torch.strided else tensor.layout} for shape "
            f"{tuple(tensor.shape)}: replace it by its `.contiguous()` copy."
        )


def is_dense(shape: Sequence[int], stride: Sequence[int]) -> bool:
    """Return whether elements fill one block of memory, for any order of dimensions."""
    expected = 1
    for step, size in sorted(zip(stride, shape, strict=True)):
        if size == 1:
            continue
        if step != expected:
            return 0 in shape
        expected *= size
    return True


def check_unwrapped(model: nn.Module) -> None:
    """Raise ValueError if a model, or a part of it, is wrapped in DDP or FSDP."""
    for name, module in model.named_modules():
        # Classes that `fully_shard` makes have one of that package among theirs.
        kinds = (kind.__module__ for kind in type(module).__mro__)
        is_fsdp = any(kind.startswith("torch.distributed.fsdp") for kind in kinds)
        if is_fsdp or isinstance(module, DistributedDataParallel):
            wrapper = "FSDP" if is_fsdp else "DistributedDataParallel"
            where = f"its part `{name}`" if name else "it"
            raise ValueError(
                f"`model` must be the plain model, as Unisono divides batches and sums gradients "
                f"by itself, but {where} is wrapped in {wrapper}, which calls collectives in each "
                f"pass: leave out that wrapper and pass what it wraps."
            )


def digest_of(model: nn.Module, optimizer: Optimizer) -> str:
    """Hash every tensor with its name, dtype and shape, in the order of names."""
    return _hash_of(_tensors(model, optimizer))


def digest_of_weights(model: nn.Module) -> str:
    """Hash a model's parameters and buffers in the same way, except those without a shape yet."""
    named = itertools.chain(model.named_parameters(), model.named_buffers())
    return _hash_of(item for item in named if not is_lazy(item[1]))


def _hash_of(tensors: Iterable[tuple[str, torch.Tensor]]) -> str:
    total = hashlib.sha256()
    for name, tensor in sorted(tensors, key=lambda pair: pair[0]):
        head = f"{name}\0{tensor.dtype}\0{tuple(tensor.shape)}\0"
        total.update(head.encode())
        total.update(in_rows(tensor))
    return total.hexdigest()


def _tensors(model: nn.Module, optimizer: Optimizer) -> Iterator[tuple[str, torch.Tensor]]:
    parameters = named_parameters(model, optimizer)
    for name, parameter in parameters.items():
        yield f"parameter {name}", parameter
    for name, buffer in model.named_buffers():
        yield f"buffer {name}", buffer
    for name, state in named_states(optimizer, parameters).items():
        for key, value in state.items():
            if isinstance(value, (torch.Tensor, int, float)):
                yield f"optimizer {key} {name}", torch.as_tensor(value, device=HOST)
            else:
                for path, tensor in tensors_in(value, str(key)):
                    yield f"optimizer {path} {name}", tensor


BufferOwner = tuple[torch.nn.Module, str]


def owners_of_buffers(model: torch.nn.Module) -> dict[str, list[BufferOwner]]:
    """Return each distinct buffer by its first full name, with every module that holds it."""
    first_names: dict[int, str] = {}
    owners: dict[str, list[BufferOwner]] = {}
    for prefix, module in model.named_modules():
        for name, buffer in module._buffers.items():
            if buffer is not None:
                full_name = f"{prefix}.{name}" if prefix else name
                first = first_names.setdefault(id(buffer), full_name)
                owners.setdefault(first, []).append((module, name))
    return owners


def lazy_owners(model: torch.nn.Module) -> list[BufferOwner]:
    """Return the buffers that are registered but None."""
    return [
        (module, name)
        for module in model.modules()
        for name, buffer in module._buffers.items()
        if buffer is None
    ]


def buffer_at(owner: BufferOwner) -> torch.Tensor:
    """Return the buffer of an owner."""
    module, name = owner
    buffer = module._buffers[name]
    assert buffer is not None
    return buffer


def buffers_noted(model: torch.nn.Module) -> Callable[[], None]:
    """Save a model's buffers; return a function that restores them."""
    saved = [
        (module, name, buffer, buffer.clone())
        for module in model.modules()
        for name, buffer in module._buffers.items()
        if buffer is not None
    ]
    lazy = lazy_owners(model)

    def put_back() -> None:
        for module, name, buffer, value in saved:
            module._buffers[name] = buffer
            buffer.data.copy_(value)  # a graph may wait for its backward pass
        for module, name in lazy:
            module._buffers[name] = None

    return put_back


@contextmanager
def buffers_put_back(model: torch.nn.Module) -> Iterator[Callable[[], None]]:
    """Restore a model's buffers after the block; yield a function that restores them within."""
    put_back = buffers_noted(model)
    try:
        yield put_back
    finally:
        put_back()
