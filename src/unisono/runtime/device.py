"""The device that a worker computes on: the only file that checks the type of a device.

It covers generators, threads, autocast, the gradient scaler, streams, copies, pinned memory, raw
bytes of tensors, and device facts that determine a run's bits. All other code on the path of a
batch is the same for all devices; ``tests/test_architecture.py`` checks that.

Accelerators are used through what ``torch.cuda`` has in common with torch's other device modules.
Tested on the CPU and on a simulated device; not on a GPU yet.
"""

from __future__ import annotations

import functools
import os
import platform
import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Any, final

import numpy as np
import torch

from unisono.runtime.arrivals import Arrivals, report_not_pinned
from unisono.runtime.world import WORKSPACE_VARIABLE, World, fix_workspaces, workers_per_gpu

HOST = "cpu"
"""The type of device whose tensors are in host memory."""
AUTO = "auto"
_SPIN_S, _NAP_S = 200e-6, 50e-6
_NAP_PART = 0.01  # of the time waited so far: a device that hangs costs almost no processor time
# torch seeds a process, and `fresh_seed` a job, with 64 random bits. People choose smaller seeds,
# or negative ones, which torch converts to values just below 2⁶⁴.
_CHOSEN_BELOW, _CHOSEN_FROM = 2**53, 2**64 - 2**32
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes


@final
class Device:
    """The device that one worker computes on: the CPU, or one accelerator.

    It may also be several accelerators of one type (`parts`) that a model is split over; batches
    are copied to the first one. An accelerator has an index, and becomes the current device.
    """

    def __init__(self, device: torch.device, *more: torch.device) -> None:
        others = [each for each in dict.fromkeys(more) if each != device]
        self.parts: tuple[Device, ...] = (
            (Device(device), *map(Device, others)) if others else (self,)
        )
        self.torch, self.is_host, self.is_divided = device, device.type == HOST, bool(others)
        self._module: Any = None
        self._arrivals: Arrivals | None = None
        if not self.is_host:
            self._module = torch.get_device_module(device)
            self._arrivals = Arrivals(device, self._module)
            self._module.set_device(device)
            torch.empty(0, device=device)  # the first use creates its generators

    @classmethod
    def of(cls, name: str | torch.device, world: World) -> Device:
        """Return a worker's device; a name without an index gives each worker a different one."""
        if name == AUTO:
            name = "cuda" if torch.cuda.is_available() else HOST
        device = read_name(name)
        if device.type == HOST:
            return cls(torch.device(HOST))
        count = count_of(device.type)
        if count == 0:
            raise ValueError(
                f"`device` must be there, but torch finds no {device.type!r} device on this "
                f'machine: pass `device="auto"`, or leave it out.'
            )
        own = world.local_rank // workers_per_gpu(os.environ)
        index = own if device.index is None else device.index
        if index >= count:
            raise ValueError(
                f"`device` must have a device for each worker, but worker {world.local_rank} of "
                f"this host would need {device.type}:{index} and there are {count}: start fewer "
                f"workers, have several share one with `--workers-per-gpu`, or pass "
                f'`device="cpu"`.'
            )
        return cls(torch.device(device.type, index))

    @property
    def name(self) -> str:
        """The name in torch, such as ``"cuda:1"``."""
        return ", ".join(str(part.torch) for part in self.parts)

    @property
    def model(self) -> str:
        """The model name, such as ``"NVIDIA H200"``; empty for the CPU."""
        return "" if self.is_host else str(self._module.get_device_name(self.torch))

    @property
    def facts(self) -> str:
        """A description of the properties that determine a run's bits."""
        if self.is_host:
            return torch.backends.cpu.get_cpu_capability() + " " + platform.machine()
        if self.is_divided:  # listed once if they are alike
            return "; ".join(dict.fromkeys(part.facts for part in self.parts))
        said = [f"{self.torch.type} {self.model}"]
        capability = self._module.get_device_capability(self.torch)
        said.append("capability " + ".".join(map(str, capability)))
        if find := getattr(self._module, "get_device_properties", None):
            said.append(f"{find(self.torch).multi_processor_count} multiprocessors")
        if torch.version.cuda:
            cudnn = torch.backends.cudnn.version()  # type: ignore[no-untyped-call]
            said.append(f"CUDA {torch.version.cuda}, cuDNN {cudnn}")
        said.append(f"{WORKSPACE_VARIABLE}={os.environ.get(WORKSPACE_VARIABLE)}")
        return ", ".join(said)

    def fix_workspaces(self) -> None:
        """Set a fixed size of cuBLAS workspaces, as exact results need; before any product."""
        if not self.is_host:
            fix_workspaces(os.environ)

    @property
    def identity(self) -> str:
        """What distinguishes it from all other devices of this machine, in every process."""
        if self.is_host:
            return HOST
        if self.is_divided:
            return ", ".join(part.identity for part in self.parts)
        properties = self._module.get_device_properties(self.torch)
        return str(getattr(properties, "uuid", self.name))

    def seed(self, seed: int) -> None:
        """Seed every default generator (Python's, numpy's, torch's, the device's) from 64 bits."""
        seed_generators(seed)
        if not self.is_host:
            for part in self.parts:
                default_generator(part.torch).manual_seed(seed)

    def generators_put_back(self) -> AbstractContextManager[None]:
        """Restore every default generator after the block, even on errors."""
        return generators_put_back([part.torch for part in self.parts])

    def autocast(self, dtype: torch.dtype) -> AbstractContextManager[Any]:
        """Run operations that torch considers safe in `dtype` within the block."""
        return torch.autocast(self.torch.type, dtype)

    def has(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor is on this device."""
        return any(tensor.device == part.torch for part in self.parts)

    def backward(self, loss: torch.Tensor, weight: torch.Tensor) -> None:
        """Run the backward pass of a loss."""
        if not self.is_divided:
            torch.autograd.backward(loss, weight)
            return
        # Each device would get a thread, and gradients would be added in order of arrival. In a
        # single thread the order is that of one device.
        with torch.autograd.set_multithreading_enabled(False):
            torch.autograd.backward(loss, weight)

    def groups(self, tensors: list[torch.Tensor]) -> list[list[torch.Tensor]]:
        """Divide tensors into lists for calls that accept only one device."""
        if self.is_divided:
            return [group for (group,) in by_device(tensors)]
        return [tensors] if tensors else []

    def move(self, batch: Any) -> Any:
        """Copy a batch's tensors to the device through pinned memory; the host does not wait."""
        return batch if self._arrivals is None else self._arrivals.begin(batch)()

    def bring(self, batch: Any) -> Callable[[], Any]:
        """Start to copy a batch to the device; see :meth:`~.arrivals.Arrivals.begin`."""
        return (lambda: batch) if self._arrivals is None else self._arrivals.begin(batch)

    def memory(self) -> tuple[int, int] | None:
        """Return the bytes of this process's tensors on it, current and peak; None on the CPU."""
        if self.is_host:
            return None
        # The flat statistics take much longer.
        found = map(self._module.memory_stats_as_nested_dict, [part.torch for part in self.parts])
        each = [stats["allocated_bytes"]["all"] for stats in found]
        return sum(one["current"] for one in each), sum(one["peak"] for one in each)

    def room(self) -> tuple[int | None, int]:
        """Return the free bytes of the device's memory (None: unknown) and its total bytes."""
        if self.is_host:
            return None, os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        each = [self._module.mem_get_info(part.torch) for part in self.parts]
        return sum(int(free) for free, _ in each), sum(int(total) for _, total in each)

    def copies(self) -> Copies:
        """Return copies between this device and the host."""
        return Copies(self, self._module)

    def register(self, memory: torch.Tensor) -> Callable[[], None] | None:
        """Pin host memory in place, so that the host does not wait for copies from and to it.

        Returns a function that undoes it; None, after one report, if the memory cannot be pinned.
        """
        runtime = getattr(self._module, "cudart", None)
        if runtime is None or not memory.nbytes:
            return None
        place = memory.data_ptr()
        if code := int(runtime().cudaHostRegister(place, memory.nbytes, 0)):
            report_not_pinned("gradients and buffers", f"error {code}")
            # The driver reports the failure to the next call as well.
            with suppress(RuntimeError):
                torch.zeros(1, device=self.torch)
            return None
        return lambda: runtime().cudaHostUnregister(place) and None


@final
class Copies:
    """Copies between a device and the host that run while the device computes.

    On the CPU they are made at once. Host memory that is copied from or to must not change until
    :meth:`wait` has returned. The host may wait if the memory is not pinned.
    """

    def __init__(self, device: Device, module: Any) -> None:
        self.device, self._module = device.torch, module
        self._streams: dict[torch.device, Any] = {}
        self._busy: dict[torch.device, Any] = {}  # by device, the event recorded after the copies
        if module is not None:
            self._streams = {part.torch: module.Stream(part.torch) for part in device.parts}
            self._events = {part.torch: module.Event() for part in device.parts}

    def to_host(self, into: torch.Tensor, source: torch.Tensor) -> None:
        """Copy to the host, after all work that the device has been given."""
        self._copy(into, source, source.device)

    def to_device(self, into: torch.Tensor, source: torch.Tensor) -> None:
        """Copy to the device, before all work that it is given from now on."""
        self._copy(into, source, into.device)
        self._hold_back(into.device)

    def before_changes(self) -> None:
        """Delay later work of the devices until all copies are made: it may change the sources."""
        for device in self._streams:
            self._hold_back(device)

    def wait(self) -> None:
        """Wait until all copies are made.

        There is no limit: if the device never answers, the launcher treats this worker as stalled.
        """
        # By polling: a thread that waits inside of the driver handles no signals.
        begun_at_s = time.perf_counter()
        for event in self._busy.values():
            while not event.query():
                waited_s = time.perf_counter() - begun_at_s
                if waited_s > _SPIN_S:
                    time.sleep(max(_NAP_S, _NAP_PART * waited_s))
        self._busy.clear()

    def issued(self) -> Callable[[], bool]:
        """Return a function that tells, in any thread, whether all copies so far are made."""
        events = [self._streams[device].record_event() for device in self._busy]
        return lambda: all(event.query() for event in events)

    def _hold_back(self, device: torch.device) -> None:
        if self._module is not None:
            self._module.current_stream(device).wait_stream(self._streams[device])

    def _copy(self, into: torch.Tensor, source: torch.Tensor, device: torch.device) -> None:
        if self._module is None:
            into.copy_(source)
            return
        stream = self._streams[device]
        stream.wait_stream(self._module.current_stream(device))
        with self._module.stream(stream):
            into.copy_(source, non_blocking=True)
        # Keep memory that the program frees now from reuse until the copy is made.
        (into if source.is_cpu else source).record_stream(stream)
        self._busy[device] = self._events[device]
        self._events[device].record(stream)


def by_device(tensors: Sequence[torch.Tensor], *others: Sequence[torch.Tensor]) -> Iterator[Any]:
    """Yield equally long lists grouped by the device of the first one's tensors, each a tuple.

    For calls that accept only one device. Tensors without elements are omitted.
    """
    places: dict[torch.device, list[int]] = {}
    for at, tensor in enumerate(tensors):
        if tensor.numel():
            places.setdefault(tensor.device, []).append(at)
    for each in places.values():
        yield tuple([some[at] for at in each] for some in (tensors, *others))


def host() -> Device:
    """Return the CPU."""
    return Device(torch.device(HOST))


def default_generator(device: torch.device) -> torch.Generator:
    """Return the default generator of a device."""
    if device.type == HOST:
        return torch.default_generator
    generator: torch.Generator = torch.get_device_module(device).default_generators[device.index]
    return generator


def is_on_host(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is in host memory."""
    return tensor.device.type == HOST


def read_name(name: str | torch.device, argument: str = "device") -> torch.device:
    """Return the device with a name that was passed as the argument `argument`."""
    try:
        return torch.device(name)
    except (RuntimeError, TypeError) as error:
        must = 'be "auto" or name a device' if argument == "device" else "name devices"
        raise TypeError(
            f'`{argument}` must {must} of torch, such as "cuda" or "cuda:1", but '
            f"{'is' if argument == 'device' else 'one is'} {name!r}: write "
            f'"{f"cuda:{name}" if str(name).isdecimal() else "cuda"}", or "cpu".'
        ) from error


def count_of(kind: str) -> int:
    """Return the number of accelerators of a type that torch finds."""
    try:
        module = torch.get_device_module(kind)
        return int(module.device_count()) if module.is_available() else 0
    except (RuntimeError, AttributeError):
        return 0


def flushes_denormals() -> bool:
    """Return whether this thread flushes denormal numbers to 0 (``torch.set_flush_denormal``)."""
    return not (torch.tensor(1e-40, dtype=torch.float32, device=HOST) * 1.0).item()


def seed_generators(seed: int) -> None:
    """Seed every default generator of this process (Python's, numpy's, torch's) from 64 bits.

    numpy gets the low 32 bits: two words take 13 microseconds longer, and
    :func:`unisono.plan.seeds.seed_of` makes the low bits differ.
    """
    torch.default_generator.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)


def drawn_so_far() -> list[Any]:
    """Return the positions of Python's, numpy's and torch's default generators on the host."""
    return [
        hash(random.getstate()),
        np.random.get_state(legacy=False),
        torch.default_generator.get_state(),
    ]


@contextmanager
def generators_put_back(devices: Sequence[torch.device] = ()) -> Iterator[None]:
    """Restore every default generator, including those of some devices, after the block."""
    states = generator_states(devices)
    try:
        yield
    finally:
        set_generator_states(states, devices)


def generator_states(devices: Sequence[torch.device] = ()) -> list[Any]:
    """Return the states of every default generator, including those of some devices."""
    generators = [default_generator(device) for device in devices if device.type != HOST]
    of_torch = [generator.get_state() for generator in (torch.default_generator, *generators)]
    return [random.getstate(), np.random.get_state(), of_torch]


def set_generator_states(states: Sequence[Any], devices: Sequence[torch.device] = ()) -> None:
    """Set every default generator to these states."""
    of_python, of_numpy, of_torch = states
    random.setstate(of_python)
    np.random.set_state(of_numpy)
    generators = [default_generator(device) for device in devices if device.type != HOST]
    for generator, state in zip((torch.default_generator, *generators), of_torch, strict=False):
        generator.set_state(state)


def drawn_without_seed() -> bool:
    """Return whether torch's default generator was used without a seed that a program chose.

    Until a program seeds it, its seed is random. One in 2,000 random seeds looks like a program's.
    """
    seed = torch.default_generator.initial_seed()
    if not _CHOSEN_BELOW <= seed < _CHOSEN_FROM:
        return False
    untouched = torch.Generator().manual_seed(seed).get_state()
    return not torch.equal(torch.default_generator.get_state(), untouched)


@functools.cache
def notices() -> set[str]:
    """Return the notices about generators that this process has shown."""
    return set()


@contextmanager
def num_threads(threads: int) -> Iterator[None]:
    """Compute with `threads` threads within the block; the number is part of a run's identity."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def grad_scaler() -> torch.amp.GradScaler:
    """Return a gradient scaler of torch."""
    return torch.amp.GradScaler(HOST)


def array_of(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    """Return a tensor's elements as an array, which shares its memory if possible."""
    return tensor.detach().cpu().numpy()


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """Return a view of a dense tensor's elements as bytes, in memory order.

    Writing to the view writes to the tensor.
    """
    return in_memory_order(tensor).view(torch.uint8).numpy().data


def bits_of(tensor: torch.Tensor) -> torch.Tensor:
    """View a tensor's elements as integers, which tell -0.0 from 0.0 and a NaN from another."""
    real = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    return real.view(_INTEGERS[real.itemsize])


def in_memory_order(tensor: torch.Tensor) -> torch.Tensor:
    """Return a view of a dense tensor's elements as a vector, in memory order."""
    return tensor.detach().as_strided((tensor.numel(),), (1,))


def in_rows(tensor: torch.Tensor) -> memoryview:
    """Return a tensor's elements as bytes, in row-major order."""
    return bytes_of(tensor.detach().cpu().resolve_conj().resolve_neg().contiguous())


def on_host(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor in host memory: itself, or a copy."""
    return tensor.detach().cpu()
