"""torch's DataParallel with results that do not depend on the number of devices."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any

import torch
from torch.nn.parallel import DataParallel as TorchDataParallel

from unisono.distributed.chunks import Inputs, count_chunks, cut, join, places
from unisono.distributed.module_replica import Original, aliases, refuse_compiled, through_gate
from unisono.plan.seeds import seed_of
from unisono.runtime.device import HOST, Device, notices, read_name
from unisono.runtime.notices import add_note, say
from unisono.runtime.whole import check_whole

_STREAM = "DataParallel"
_TorchDataParallel: Any = TorchDataParallel  # so that methods can be typed


class DataParallel(_TorchDataParallel):  # type: ignore[misc]
    """Computes each batch in chunks, on several devices of this process.

    Replaces ``torch.nn.DataParallel`` in a plain loop, and is a subclass of it::

        model = unisono.DataParallel(Net().to("cuda:0"), device_ids=[0, 1], shards=4)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for x, y in loader:
            optimizer.zero_grad()
            loss = criterion(model(x), y)
            loss.backward()
            optimizer.step()

    A batch is cut along `dim` into at most `shards` contiguous chunks, as ``torch.chunk`` cuts:
    each has ⌈batch / shards⌉ samples, except that the last one has the rest. Each device computes a
    contiguous range of chunks. Outputs are concatenated in the chunks' order on `output_device`.
    Differences from torch's class:

    * **Results do not depend on the number of devices**: outputs, gradients and buffers have the
      same bits if `shards` is the same and the devices are of one model. The chunks' gradients
      are summed along one binary tree (:mod:`unisono.plan.summation`). A forward pass draws one
      number from torch's CPU generator, which determines the random numbers of all chunks, so
      dropout is also the same. With ``shards=1`` the result is that of the module itself.
    * **No Python threads**: chunks are launched one after the other. In the backward pass, autograd
      uses one thread for each device.
    * Parameters without a gradient in any chunk keep None. ``parameters()`` works in replicas.
    * CPUs may be used: ``device_ids=["cpu", "cpu"]``.

    As in torch's class:

    * Tensors in tuples, named tuples, lists and dicts are cut; other values are passed to every
      chunk. A module without inputs is called once.
    * Attributes that a module sets in its forward pass are lost. Buffers are kept as
      the first chunk left them, for example BatchNorm's averages. Each chunk starts from
      the module's buffers.
    * Hooks are called for each chunk. Scalars are gathered into a vector, with a warning.
    * With ``shards=1``, the module itself is called with its inputs copied to the device.

    Activation checkpointing needs ``use_reentrant=False``, as the other kind adds gradients in the
    order in which devices finish. So does autograd if the module is called three or more times
    before a backward pass and the loss is on another device than the first; in this case call
    ``backward`` within ``torch.autograd.set_multithreading_enabled(False)``.

    Tested on CPUs and on simulated devices; **not run on GPUs yet**.

    Args:
        module: the module; it must be on the first device when it is called.
        device_ids: numbers of accelerators, or torch devices of one type; one device may be listed
            several times. Where there are no accelerators, each number is the CPU. None: all
            accelerators; if there is none, the module is called on the CPU, in chunks if `shards`
            is given.
        output_device: the device of the outputs; by default the first one. -1 is the CPU.
        dim: the dimension of tensors along which samples are stacked.
        shards: the maximum number of chunks of a batch; by default the number of devices.

    Attributes:
        module: the module.
        device_ids: numbers of accelerators, or devices of the CPU.
        shards: the maximum number of chunks of a batch.

    Raises:
        TypeError: `device_ids` or `output_device` names no device, `dim` is no whole number, or
            `module` is no module; later, an input cannot be cut or an output cannot be gathered.
        ValueError: a device is not there, devices are of several types, `shards` is below 1 or
            the module is compiled; later, tensors of a batch give different numbers of chunks, or
            outputs do not fit together.
        RuntimeError: later, the module is not on the first device. An exception in a chunk has
            a note with the chunk and its device.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        device_ids: Sequence[Name] | None = None,
        output_device: Name | None = None,
        dim: int = 0,
        shards: int | None = None,
    ) -> None:
        torch.nn.Module.__init__(self)
        if not isinstance(module, torch.nn.Module):
            raise TypeError(f"`module` must be a torch.nn.Module, but is {module!r}.")
        if shards is not None and (type(shards) is not int or shards < 1):
            raise ValueError(
                f"`shards` must be a whole number from 1 on, but is {shards!r}: pass into how many "
                f"chunks a batch is cut, or leave it out for one a device."
            )
        refuse_compiled(module, module.modules())
        devices = read_devices(device_ids)
        if not devices and shards is not None:
            devices = (torch.device("cpu"),)
        self.module, self.dim = module, check_whole("dim", dim, at_least=-64, below=64)
        self.shards = shards or max(1, len(devices))
        self.devices = devices
        self.device_ids = [device if device.index is None else device.index for device in devices]
        if not devices:
            return
        self.src_device_obj = devices[0]
        self._output = (
            devices[0] if output_device is None else read_device("output_device", output_device)
        )
        self.output_device = self._output if self._output.index is None else self._output.index
        if len(devices) == 1:
            self.module.to(devices[0])

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Call the module with the chunks of a batch, and gather the outputs."""
        with torch.autograd.profiler.record_function("DataParallel.forward"):
            if not self.devices:
                return self.module(*inputs, **kwargs)
            original = Original(self.module)
            original.check(self.devices[0])
            if self.shards == 1:
                (chunk,) = cut(inputs, kwargs, self.devices[:1], self.dim, owned=False)
                return self.module(*chunk[0], **chunk[1])
            devices = places(self._count(inputs, kwargs), self.devices)
            args, options = self.scatter(inputs, kwargs, devices)
            chunks = list(zip(args, options, strict=True))
            outputs = self._compute(original, chunks, devices[: len(args)])
            return self.gather(outputs, self._output)

    def scatter(
        self, inputs: tuple[Any, ...], kwargs: dict[str, Any] | None, device_ids: Sequence[Any]
    ) -> tuple[tuple[tuple[Any, ...], ...], tuple[dict[str, Any], ...]]:
        """Cut a batch; a subclass may override how.

        Args:
            inputs: the positional arguments of the module.
            kwargs: the keyword arguments of the module.
            device_ids: the device of each chunk; in a subclass, of the maximum number of chunks.

        Returns:
            The positional arguments of each chunk, and its keyword arguments.
        """
        chunks = cut(inputs, kwargs or {}, device_ids, self.dim)
        return tuple(chunk[0] for chunk in chunks), tuple(chunk[1] for chunk in chunks)

    def gather(self, outputs: Sequence[Any], output_device: Any) -> Any:
        """Join the chunks' outputs on a device; a subclass may override how."""
        return join(outputs, output_device, self.dim)

    def _count(self, inputs: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
        if type(self).scatter is not DataParallel.scatter:
            return self.shards
        return count_chunks(inputs, kwargs, self.shards, self.dim)

    def _compute(
        self, original: Original, chunks: Sequence[Inputs], devices: Sequence[torch.device]
    ) -> list[Any]:
        tensors = self._tensors_of_chunks(original, devices)
        outputs, replicas = [], []
        drawn = int(torch.empty((), dtype=torch.int64, device="cpu").random_())
        with ExitStack() as stack:
            for device in dict.fromkeys(devices):
                stack.enter_context(_device(device).generators_put_back())
            for chunk, (inputs, device) in enumerate(zip(chunks, devices, strict=True)):
                # All are kept to the end, so that no `id` is reused.
                replicas.append(original.replicate(tensors[chunk]))
                try:
                    with _as_current(device):
                        _device(device).seed(seed_of(_STREAM, drawn, chunk))
                        output = replicas[chunk][id(self.module)](*inputs[0], **inputs[1])
                except Exception as error:
                    add_note(
                        error,
                        f"In unisono.DataParallel, chunk {chunk} of {len(chunks)} (counted from 0) "
                        f"on device {device}.",
                    )
                    raise
                outputs.append(through_gate(output))
        _keep_buffers(original, replicas[0], tensors[0])
        return outputs

    def _tensors_of_chunks(
        self, original: Original, devices: Sequence[torch.device]
    ) -> list[dict[int, torch.Tensor]]:
        """Return for each chunk the replacement of each parameter and buffer, by its ``id``."""
        everything = original.parameters + original.buffers
        there = {devices[0]: everything}
        for device in dict.fromkeys(devices):
            if device not in there:
                there[device] = [each.detach().to(device, non_blocking=True) for each in everything]
        num_parameters = len(original.parameters)
        given = []
        for chunk, device in enumerate(devices):
            own = [copy.detach() for copy in there[device][:num_parameters]]
            buffers = there[device][num_parameters:]
            own += [copy.detach().clone() for copy in buffers] if chunk else original.buffers
            given.append(dict(zip(map(id, everything), own, strict=True)))
        trained = [i for i, tensor in enumerate(everything) if tensor.requires_grad]
        if trained and torch.is_grad_enabled():
            copies = {device: [all_of[i] for i in trained] for device, all_of in there.items()}
            handed = aliases([everything[i] for i in trained], devices, copies)
            for into, own_aliases in zip(given, handed, strict=True):
                into.update(zip((id(everything[i]) for i in trained), own_aliases, strict=True))
        return given


def _keep_buffers(
    original: Original,
    replicas: Mapping[int, torch.nn.Module],
    given: Mapping[int, torch.Tensor],
) -> None:
    """Keep the buffers that the first chunk has replaced; its in-place changes are kept anyway."""
    for part in original.parts:
        for name, buffer in part._buffers.items():
            left = replicas[id(part)]._buffers.get(name)
            if left is not (None if buffer is None else given[id(buffer)]):
                part._buffers[name] = left


@functools.cache
def _device(device: torch.device) -> Device:
    with _as_current(device):  # a Device makes itself the current one
        return Device(device)


def _as_current(device: torch.device) -> AbstractContextManager[object]:
    return nullcontext() if device.type == HOST else torch.accelerator.device_index(device.index)


Name = int | str | torch.device
_HOST = torch.device("cpu")


def read_devices(device_ids: Iterable[Name] | None) -> tuple[torch.device, ...]:
    """Return the devices of a DataParallel, each with its index; empty if there are none."""
    if device_ids is None:
        kind = accelerator()
        count = 0 if kind is None else torch.accelerator.device_count()
        return tuple(torch.device(str(kind), index) for index in range(count))
    if isinstance(device_ids, str) or not isinstance(device_ids, Iterable):
        raise TypeError(
            f"`device_ids` must be a list of devices, but is {device_ids!r}: pass "
            f"`device_ids=[{device_ids!r}]`."
        )
    devices = tuple(read_device("device_ids", name) for name in device_ids)
    kinds = sorted({device.type for device in devices})
    if len(kinds) > 1:
        raise ValueError(
            f"`device_ids` must be devices of one type, but are of {' and '.join(kinds)} "
            f"({', '.join(map(str, devices))}): their results differ in the last bits, so pass "
            f"those of one type."
        )
    return devices


def read_device(argument: str, name: Name) -> torch.device:
    """Return a device with its index, from torch's name or a number; -1 is the CPU."""
    if isinstance(name, int) and not isinstance(name, bool):
        if name == -1:
            return _HOST
        kind = accelerator()
        if kind is None:
            if "no accelerator" not in notices():
                notices().add("no accelerator")
                say("torch finds no accelerator here, so DataParallel's devices are the CPU")
            return _HOST
        return _there(argument, torch.device(kind, name))
    device = read_name(name, argument)  # type: ignore[arg-type]  # True, say
    if device.type == _HOST.type:
        return _HOST
    if str(device) == accelerator():  # without an index
        device = torch.device(device.type, torch.accelerator.current_device_index())
    return _there(argument, device)


def accelerator() -> str | None:
    """Return the type of this machine's accelerators; None if there are none."""
    found = torch.accelerator.current_accelerator(check_available=True)
    return None if found is None else found.type


def _there(argument: str, device: torch.device) -> torch.device:
    count = torch.accelerator.device_count() if device.type == accelerator() else 0
    if not 0 <= (device.index or 0) < count:
        raise ValueError(
            f"`{argument}` must name devices that are there, but has {device}, and torch finds "
            f"{count} of type {device.type} on this machine: pass others, or None for all."
        )
    return device
