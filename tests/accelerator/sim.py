"""A device type of its own, "sim", with four devices that are not there.

For tests of what must hold on an accelerator on a machine without one: nothing mixes devices, every
wait is there, nobody waits in secret, memory is bounded. ``README.md`` says what it is, and what it
does not simulate. Nothing is changed before :func:`install`.
"""

from __future__ import annotations

import ctypes
import functools
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from tests.accelerator import torch_sim
from tests.accelerator.building import CannotBuild, library

DEVICES = torch_sim.DEVICES
NO_LIMIT = 2**40
_NOT_THE_CALLER = (f"{Path(torch.__file__).parent}/", torch_sim.__file__, __file__)


@dataclass(frozen=True)
class Synchronization:
    """One time that the host waited for a device.

    Attributes:
        kind: "item", "result" (of a size that only the device knows), "copy to the host", "copy
            from the host", "copy of pageable memory" (``non_blocking``, yet a GPU would wait),
            "stream", "event" or "device".
        file, line, function: the innermost line of Python outside of torch; nothing and 0 in a
            thread of torch's, such as the backward pass's.
    """

    kind: str
    file: str
    line: int
    function: str


def why_not() -> str | None:
    """Say why there is no test accelerator on this machine; compile it where nobody has."""
    try:
        library()
    except CannotBuild as error:
        return str(error)
    return None


def load() -> None:
    """Load the library, where there is one, for processes that are forked of this one.

    That takes forty times as long as the rest of :func:`install`, and changes nothing before it.
    """
    if why_not() is None:
        ctypes.CDLL(str(library()))


def install() -> None:
    """Make "sim" known to torch in this process. A second time does nothing.

    Raises:
        CannotBuild: see :func:`why_not`.
    """
    _loaded()


def limit(device: int, num_bytes: int | None) -> None:
    """Set how many bytes a device has; None: as many as it likes."""
    loaded = _loaded().sim
    loaded.sim_limit(_checked(device), NO_LIMIT if num_bytes is None else num_bytes)


def pending_copies(device: int) -> int:
    """Count the copies from and to a device that were issued and not made."""
    return int(_loaded().sim.sim_pending_copies(_checked(device)))


@contextmanager
def synchronizations() -> Iterator[list[Synchronization]]:
    """Collect every time that the host waits for a device, in all threads, inside the block."""
    seen: list[Synchronization] = []
    listeners = _loaded().listeners
    listeners.append(seen)
    try:
        yield seen
    finally:
        del listeners[next(i for i, each in enumerate(listeners) if each is seen)]


def register(tensor: torch.Tensor) -> None:
    """Count memory of the host as pinned from now on, as ``cudaHostRegister`` does."""
    storage = tensor.untyped_storage()
    _loaded().sim.sim_register(storage.data_ptr(), storage.nbytes())


def unregister(tensor: torch.Tensor) -> None:
    """Undo :func:`register`, before the memory goes."""
    _loaded().sim.sim_unregister(tensor.untyped_storage().data_ptr())


class _Loaded:
    """The library in this process, and whoever wants to know of synchronizations. Final."""

    def __init__(self) -> None:
        self.sim = ctypes.CDLL(str(library()))
        self.sim.sim_limit.argtypes = [ctypes.c_int, ctypes.c_size_t]
        self.sim.sim_register.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
        self.sim.sim_unregister.argtypes = [ctypes.c_void_p]
        self.listeners: list[list[Synchronization]] = []
        self._told = ctypes.CFUNCTYPE(None, ctypes.c_char_p)(self._tell)
        self.sim.sim_listen(self._told)

    def _tell(self, kind: bytes) -> None:
        if not self.listeners:
            return
        frame = sys._getframe().f_back
        while frame is not None and frame.f_code.co_filename.startswith(_NOT_THE_CALLER):
            frame = frame.f_back
        if frame is None:
            seen = Synchronization(kind.decode(), "", 0, "")
        else:
            code = frame.f_code
            seen = Synchronization(
                kind.decode(), code.co_filename, frame.f_lineno, code.co_qualname
            )
        for each in list(self.listeners):
            each.append(seen)


@functools.cache
def _loaded() -> _Loaded:
    torch.set_num_threads(torch.get_num_threads())  # after a fork torch makes its pool anew: alone
    torch.ones((), requires_grad=True).backward()  # so that nothing starts threads a second time
    loaded = _Loaded()
    torch.utils.rename_privateuse1_backend("sim")
    torch._register_device_module("sim", torch_sim)
    torch.utils.generate_methods_for_privateuse1_backend()
    loaded.sim.sim_install()
    loaded.sim.sim_give_default_generators(True)
    torch_sim.default_generators = tuple(
        torch.Generator(f"sim:{index}") for index in range(DEVICES)
    )
    loaded.sim.sim_give_default_generators(False)
    torch.empty(0).pin_memory()  # before, torch says of no memory that it is pinned
    _start_threads()
    return loaded


def _start_threads() -> None:
    """Give autograd a thread for each device; by itself it does so at the first backward pass.

    That may have been in the process from which this one was forked, with the CPU alone.
    """
    library = ctypes.CDLL("libtorch_cpu.so")
    find_engine = library._ZN5torch8autograd6Engine18get_default_engineEv
    find_engine.restype = ctypes.c_void_p
    library._ZN5torch8autograd6Engine20start_device_threadsEv(ctypes.c_void_p(find_engine()))


def _checked(device: int) -> int:
    if not 0 <= device < DEVICES:
        raise ValueError(f"there is no sim:{device}, only sim:0 to sim:{DEVICES - 1}")
    return device
