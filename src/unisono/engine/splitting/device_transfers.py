"""At a cut, activations move to the next device, which continues the sequence of random numbers.

::

    device 0    x ─ f ─ y ──┐        an operation runs on the latest device of its inputs
                x ──────────┼─┐      inputs on other devices are copied when needed
    device 1                └►g ─► y' + x' ─►

**A copy replaces the original** until the pass ends: all later uses of `x` use `x'`, or a copy of
that. So the gradients of all uses behind the cut are added up there, latest first, and reach `x`
before those of earlier uses: in the order in which one device adds them. Changing `x'` in place
changes `x` for all later uses, as on one device.

**The generator moves along.** Before an operation runs on a different device than the previous one,
that device's generator gets the state of the previous device's; at the end of the pass, so does the
first device's. So the devices draw the same numbers, in the same order, as one device.

Backward passes follow the same path in reverse. They must not use several threads, which would add
up gradients in order of arrival; see
``torch.autograd.set_multithreading_enabled``.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple, final

import torch
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack

from unisono.runtime.arrivals import changed_within
from unisono.runtime.device import default_generator

# Views, which gradients flow through; other properties are those of the tensor as it is.
_VIEWS = ("data", "T", "H", "mT", "mH", "real", "imag")
_AS_THEY_ARE = (
    *("backward", "grad", "register_hook", "register_post_accumulate_grad_hook"),
    *("requires_grad_", "retain_grad", "size", "dim", "stride", "numel", "__len__"),
    *("is_floating_point", "is_complex", "is_inference"),
)
_WHERE_IT_SAYS = ("to", "type_as", "type")  # these name a device themselves
_IN_PLACE = {
    "__setitem__",
    *(
        f"__i{name}__"
        for name in (
            *("add", "sub", "mul", "truediv", "floordiv", "div", "mod", "pow"),
            *("and", "or", "xor", "lshift", "rshift", "matmul"),
        )
    ),
}
_UNDER_WAY: ContextVar[DeviceTransfers | None] = ContextVar("device_transfers", default=None)


class _Copy(NamedTuple):
    """A tensor that was copied, its version at that time, and the copy."""

    original: weakref.ref[torch.Tensor]
    version: int
    copy: torch.Tensor
    copy_version: int


@final
class DeviceTransfers(TorchFunctionMode):
    """One pass through a model whose parts are on several devices.

    Args:
        devices: the devices of the parts, in order; all of one type.
    """

    def __init__(self, devices: Sequence[torch.device]) -> None:
        super().__init__()
        self.devices = tuple(devices)
        self._place_of = {device: at for at, device in reversed([*enumerate(devices)])}
        self._copies: dict[int, _Copy] = {}
        self._at = self.devices[0]

    @property
    def is_needed(self) -> bool:
        """Whether there are several different devices."""
        return len(self._place_of) > 1

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Call one of torch's functions on the right device."""
        kwargs = kwargs or {}
        kind = _kind_of(func)
        if kind == "as it is":
            return func(*args, **kwargs)
        target = None if kind == "where it says" else self._target_of(kind, args, kwargs)
        if target is None and not self._copies:
            return func(*args, **kwargs)
        if target is not None:
            self.enter(target)
        args, kwargs = self.brought((args, kwargs), target)
        return func(*args, **kwargs)

    def enter(self, device: torch.device) -> None:
        """Compute on a device from here on; its generator continues where the last one stopped."""
        if device != self._at and device in self._place_of:
            default_generator(device).set_state(default_generator(self._at).get_state())
            self._at = device

    def enter_again(self, value: Any) -> None:
        """Select the latest device of these tensors for a recomputation."""
        places = [self._place_of[tensor.device] for tensor in self._tensors_in(value)]
        if places:
            self._at = self.devices[max(places)]

    def bring(self, value: Any, device: torch.device | None) -> Any:
        """Call :meth:`brought` while calls of torch's functions are intercepted."""
        with torch._C.DisableTorchFunction():
            return self.brought(value, device)

    def brought(self, value: Any, device: torch.device | None) -> Any:
        """Move every tensor within a value to a device, or use its latest copy if that is None.

        Tensors on devices without parts stay where they are.
        """

        def there(part: Any) -> Any:
            if not isinstance(part, torch.Tensor):
                return None
            return self._brought(part, device) if part.device in self._place_of else part

        return changed_within(value, there)

    @contextmanager
    def set_aside(self) -> Iterator[None]:
        """Stop intercepting torch's functions inside the block, where all is on one device.

        While functions are intercepted, some of torch's layers run other kernels, with other bits.
        """
        stack = _get_current_function_mode_stack()  # type: ignore[no-untyped-call]
        if not stack or stack[-1] is not self:
            yield
            return
        self.__exit__(None, None, None)
        try:
            yield
        finally:
            self.__enter__()

    def leave(self) -> None:
        """End the pass, and continue the sequence of random numbers on the first device."""
        self.enter(self.devices[0])
        self._copies.clear()

    def _target_of(
        self, kind: str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> torch.device | None:
        """Return the device on which to call a function; None if it is none of the devices."""
        into = args[0] if kind == "in place" and args else kwargs.get("out")
        if isinstance(into, torch.Tensor):
            device = self._latest(into).device
            return device if device in self._place_of else None
        places = [self._place_of[tensor.device] for tensor in self._tensors_in((args, kwargs))]
        if places:
            return self.devices[max(places)]
        named = kwargs.get("device")
        if named is None:
            return None
        device = torch.empty(0, device=named).device  # with its number
        return device if device in self._place_of else None

    def _tensors_in(self, value: Any) -> Iterator[torch.Tensor]:
        """Yield the latest copies of the tensors that are on one of the devices."""
        if isinstance(value, torch.Tensor):
            if value.device in self._place_of:
                yield self._latest(value)
        elif isinstance(value, (tuple, list)):
            for item in value:
                yield from self._tensors_in(item)
        elif isinstance(value, Mapping):
            for item in value.values():
                yield from self._tensors_in(item)

    def _brought(self, tensor: torch.Tensor, device: torch.device | None) -> torch.Tensor:
        latest = self._latest(tensor)
        if device is None or latest.device == device:
            return latest
        there = latest.to(device, non_blocking=True)
        key, forget = id(latest), self._copies.pop
        known = weakref.ref(latest, lambda _: forget(key, None))
        self._copies[key] = _Copy(known, _version_of(latest), there, _version_of(there))
        return there

    def _latest(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the latest copy of a tensor."""
        while (kept := self._copies.get(id(tensor))) is not None:
            if kept.original() is not tensor:
                break
            if kept.version != _version_of(tensor):
                if kept.copy_version != _version_of(kept.copy):
                    raise RuntimeError(
                        f"an activation of shape {tuple(tensor.shape)} must be changed in place "
                        f"on one side of a cut, but was on {tensor.device} and on "
                        f"{kept.copy.device}: change a copy (`x = x + 1`, not `x += 1`)."
                    )
                break
            if torch.is_grad_enabled() and tensor.requires_grad and not kept.copy.requires_grad:
                break  # it was copied under `no_grad`
            tensor = kept.copy
        return tensor


@contextmanager
def device_transfers(
    devices: Sequence[torch.device], given: Any = None
) -> Iterator[DeviceTransfers]:
    """Run a model on these devices inside the block, as part of the pass under way if there is one.

    Args:
        given: the arguments of the model or of its part.
    """
    there = _UNDER_WAY.get()
    if there is not None and there.devices == tuple(devices):
        yield there
        return
    new = DeviceTransfers(devices)
    if not new.is_needed:
        yield new
        return
    token = _UNDER_WAY.set(new)
    try:
        with new, _undisturbed(new, given):
            yield new
    finally:
        _UNDER_WAY.reset(token)


@contextmanager
def _undisturbed(new: DeviceTransfers, given: Any) -> Iterator[None]:
    """Leave each generator in the state in which one device would leave its own."""
    if not _is_in_a_backward_pass():
        try:
            yield
        finally:
            new.leave()
        return
    # A recomputation draws the same numbers again; the caller has reset only one of the generators.
    generators = [default_generator(device) for device in new.devices]
    states = [generator.get_state() for generator in generators]
    new.enter_again(given)
    try:
        yield
    finally:
        for generator, state in zip(generators, states, strict=True):
            generator.set_state(state)


def _is_in_a_backward_pass() -> bool:
    return int(torch._C._current_graph_task_id()) != -1


@functools.cache
def _kind_of(func: Callable[..., Any]) -> str:
    name = getattr(func, "__name__", "")
    if name in ("__set__", "__delete__"):
        return "as it is"
    if name == "__get__":
        is_view = getattr(func.__self__, "__name__", "") in _VIEWS  # type: ignore[attr-defined]
        return "where it is" if is_view else "as it is"
    if name in _AS_THEY_ARE:
        return "as it is"
    if name in _WHERE_IT_SAYS:
        return "where it says"
    if name in _IN_PLACE or (name.endswith("_") and not name.endswith("__")):
        return "in place"
    return "where it is"


def _version_of(tensor: torch.Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version
