"""What happens between the sum of gradients and the update: unscale, ``on_gradients``, clip.

**Clipping** has the bits of torch's ``clip_grad_norm_`` and ``clip_grad_value_``. The norm is that
of the mean gradients of the whole global batch. Every worker computes it from all sums, in torch's
order, so it has the same bits everywhere; once all have read the sums, each scales its pieces::

    sum ── barrier ── norm of everything ── barrier ── scale my pieces, update

**on_gradients** is code of the program: noise, surgery, logging. It sees the mean gradients of the
whole global batch, once a step, on every worker. All have the same gradients and change them alike,
so it works with any exchange that can compute all sums on all workers.

An update has a list of the transforms that the run requests, in this order.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar, final

import torch
from torch.optim import Optimizer
from torch.utils._foreach_utils import _group_tensors_by_device_and_dtype

from unisono.engine.exchange.exchange import Exchange
from unisono.engine.step.records import Phase, PhaseTimers
from unisono.errors import NonFiniteLossError
from unisono.runtime.forbidden import IN_AN_UPDATE, forbid

_TINY = 1e-6  # as torch's
Met = TypeVar("Met")


class UpdateVerdict(enum.Enum):
    """The result of a transform for the update, the same on every worker."""

    GO_ON = enum.auto()
    SKIP = enum.auto()
    LOST = enum.auto()  # a worker was lost


@final
class Sums:
    """The summed gradients of an update, which transforms change."""

    def __init__(self, exchange: Exchange, timers: PhaseTimers, names: Sequence[str]) -> None:
        self.exchange, self._timers, self.names = exchange, timers, names
        self.step, self.named = 0, ""  # names the update in barriers
        self.present: Sequence[bool] = ()  # for each parameter, whether it has a gradient
        self.bad: tuple[int, float] | None = None  # a shard whose loss is not finite, and that
        self.norm: float | None = None  # of all gradients, before they were clipped by it
        self.has_norm = False  # they are to be clipped by it
        self.are_skipped = False  # they were not finite, with a scaled loss

    def meet(self, meet: Callable[[str], Met], what: str) -> Met:
        """Call `meet`, which waits for the others, with a name of this update."""
        self._timers.lap(Phase.SUMMING)
        met = meet(f"{what} {self.named}")
        self._timers.lap(Phase.WAITING)
        return met

    def groups(self, own: Container[int] | None = None) -> list[list[torch.Tensor]]:
        """View this worker's pieces with a gradient, of `own` parameters or of all, in groups.

        Scalars stay without dimensions: torch multiplies them by a scalar of a wider dtype, such as
        the norm, in that dtype, but vectors in their own.
        """
        exchange = self.exchange
        pieces = [
            total if exchange.parameters[piece.index].ndim else total.view(())
            for total, piece in zip(exchange.totals, exchange.pieces, strict=True)
            if self.present[piece.index] and (own is None or piece.index in own)
        ]
        return exchange.device.groups(pieces)

    def divide(self, weight: float) -> None:
        """Turn sums into means over the true weight."""
        for totals in self.groups():
            torch._foreach_div_(totals, weight)

    def not_finite(self, gradients: Iterable[tuple[int, torch.Tensor]]) -> tuple[str, ...]:
        """Return the names of parameters whose gradients, by position, are not finite."""
        there = ((at, total) for at, total in gradients if self.present[at])
        bad = {at for at, total in there if not bool(torch.isfinite(total).all())}
        return tuple(self.names[at] for at in sorted(bad))


Transform = Callable[[Sums], UpdateVerdict]
"""A change of the sums before an update. Collective."""


def total_norm(tensors: list[torch.Tensor]) -> torch.Tensor:
    """Compute torch's norm of tensors; on several devices with the bits of one device.

    torch's function orders the norms of tensors by device, then by dtype, and rounding depends on
    that order.
    """
    devices = {tensor.device: None for tensor in tensors}
    if len(devices) < 2:
        return torch.nn.utils.get_total_norm(tensors)
    first, norms = tensors[0].device, dict[int, torch.Tensor]()
    for device in devices:
        places = [at for at, tensor in enumerate(tensors) if tensor.device == device]
        there = torch._foreach_norm([tensors[at] for at in places], 2.0)
        norms |= {at: norm.to(first) for at, norm in zip(places, there, strict=True)}
    together = [torch.empty(0, dtype=tensor.dtype, device=first) for tensor in tensors]
    groups = _group_tensors_by_device_and_dtype([together], with_indices=True)  # type: ignore[list-item]
    order = [at for _, indices in groups.values() for at in indices]
    total: torch.Tensor = torch.linalg.vector_norm(torch.stack([norms[at] for at in order]), 2.0)
    return total


@dataclass(frozen=True, slots=True)
class Clipping:
    """How gradients are clipped; if both limits are None, they are not.

    `norm` is the largest norm of all gradients together (infinite: it is computed, and nothing is
    scaled), `value` the largest magnitude of each element.
    """

    norm: float | None = None
    value: float | None = None

    def __post_init__(self) -> None:
        for name, limit in (("clip_norm", self.norm), ("clip_value", self.value)):
            if limit is None:
                continue
            if isinstance(limit, bool) or not isinstance(limit, (int, float)):
                raise TypeError(
                    f"`{name}` must be a number, but is of type {type(limit).__name__}: pass "
                    f"`{name}=1.0`, for example."
                )
            if not (limit > 0 and (math.isfinite(limit) or name == "clip_norm")):
                raise ValueError(
                    f"`{name}` must be above 0{' and finite' * (name == 'clip_value')}, but is "
                    f"{limit}: pass `{name}=1.0`, for example, or leave it out."
                )
        if self.norm is not None and self.value is not None:
            raise ValueError(
                f"gradients can be clipped in one way, but both `clip_norm={self.norm}` and "
                f"`clip_value={self.value}` are given: leave one out."
            )

    def check_fits(self, optimizer: Optimizer) -> None:
        """Raise ValueError if `value` would clip complex parameters."""
        if self.value is None:
            return
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.is_complex():
                    raise ValueError(
                        f"`clip_value` takes real parameters alone, as torch's `clip_grad_value_` "
                        f"does, but the optimizer updates one of {parameter.dtype}: pass "
                        f"`clip_norm=1.0`, for example."
                    )


Gradients = Mapping[str, torch.Tensor]
OnGradients = Callable[[int, dict[str, torch.Tensor]], Any]
Watch = Callable[
    [Callable[[Gradients], Gradients], Gradients], Callable[[Gradients], object] | None
]


@final
class GradientHook:
    """Calls a program's function, with generators seeded for it.

    The function takes (step, gradients by name), and changes them in place or in the dict, or
    returns others by name. A gradient that it leaves out is absent, as after ``.grad = None``.
    """

    def __init__(self, function: OnGradients, seed: Callable[[str], None]) -> None:
        self._function, self._seed = function, seed
        # observes the next call: takes a function that repeats it, and the gradients; returns a
        # function that takes the gradients that the call has left
        self.watch: Watch | None = None

    def __call__(self, sums: Sums) -> UpdateVerdict:
        """Call the program's function with all sums, and use the gradients that it leaves."""
        if not sums.meet(sums.exchange.all_sums, "sums"):
            return UpdateVerdict.LOST
        sums.exchange.buffers.settle()
        named = zip(sums.names, sums.exchange.whole, sums.present, strict=True)
        gradients = {name: total for name, total, is_there in named if is_there}
        before, watch = forbid(IN_AN_UPDATE), self.watch
        self.watch = None
        try:
            with torch.no_grad():
                tell = watch and watch(partial(self._left, sums.step), gradients)
                self._seed("gradients")
                given = dict(gradients)
                returned = self._function(sums.step, given)
                kept = self._take(gradients, given if returned is None else returned)
                if tell is not None:
                    tell({name: gradients[name] for name in sorted(kept)})
        finally:
            forbid(before)
        is_whole = sums.meet(sums.exchange.are_read, "changed sums")
        flags = zip(sums.names, sums.present, strict=True)
        sums.present = tuple(is_there and name in kept for name, is_there in flags)
        return UpdateVerdict.GO_ON if is_whole else UpdateVerdict.LOST

    def _left(self, step: int, gradients: Gradients) -> Gradients:
        """Return the gradients that a call would leave, computed from copies."""
        self._seed("gradients")
        copies = {name: gradient.clone() for name, gradient in gradients.items()}
        given = dict(copies)
        returned = self._function(step, given)
        kept = self._take(copies, given if returned is None else returned)
        return {name: copies[name] for name in sorted(kept)}

    def _take(self, gradients: Mapping[str, torch.Tensor], returned: Any) -> set[str]:
        """Copy returned gradients to the sums; return the names of those that are present."""
        if not isinstance(returned, Mapping):
            raise TypeError(
                f"`on_gradients` must return None or gradients by name, but returned a "
                f"{type(returned).__name__}: change tensors in place, or return a dict of those "
                f"that are to take their place."
            )
        memory = {total.untyped_storage().data_ptr() for total in gradients.values()}
        new: list[tuple[torch.Tensor, torch.Tensor]] = []
        for name, gradient in returned.items():
            if name not in gradients:
                raise ValueError(
                    f"`on_gradients` must return gradients by the names that it is given, but "
                    f"returned {name!r}, which is none of the {len(gradients)}."
                )
            total = gradients[name]
            if gradient is None:
                continue
            if not isinstance(gradient, torch.Tensor) or gradient.shape != total.shape:
                seen = getattr(gradient, "shape", type(gradient).__name__)
                raise ValueError(
                    f"`on_gradients` must return gradients of their parameters' shapes, but "
                    f"returned {seen!s} for {name!r}, whose shape is {tuple(total.shape)}."
                )
            if gradient is not total:
                # The copies below overwrite the sums, two of which may be exchanged.
                is_of_sums = gradient.untyped_storage().data_ptr() in memory
                new.append((total, gradient.clone() if is_of_sums else gradient))
        for total, gradient in new:
            total.copy_(gradient)
        return {name for name, gradient in returned.items() if gradient is not None}


Limit = tuple[float, Container[int]]
"""A limit of clipping, and the parameters that it is for."""


def clip_values(limits: Sequence[Limit], sums: Sums) -> UpdateVerdict:
    """Clamp each element, without synchronization."""
    for limit, own in limits:
        for totals in sums.groups(own):
            torch._foreach_clamp_min_(totals, -limit)
            torch._foreach_clamp_max_(totals, limit)
    return UpdateVerdict.GO_ON


def clip_norms(limits: Sequence[Limit], sums: Sums) -> UpdateVerdict:
    """Scale gradients whose norm is too large, by optimizer."""
    exchange, present = sums.exchange, sums.present
    if not sums.meet(exchange.all_sums, "sums"):
        return UpdateVerdict.LOST
    whole = exchange.whole
    norms = [
        total_norm([total for at, total in enumerate(whole) if at in own and present[at]])
        for _, own in limits
    ]
    sums.norm = math.hypot(*map(torch.Tensor.item, norms))
    error = None
    if not math.isfinite(sums.norm):  # now, while the sums are to be read
        error = NonFiniteLossError(
            f"the norm of the gradients must be finite, but is {sums.norm} in step {sums.step}, "
            f"though every loss is; the parameters are still those before step {sums.step}: lower "
            f"the learning rate, or look for a division by zero or a square root of zero in the "
            f"model.",
            step=sums.step,
            shard=None,
            value=sums.norm,
            parameters=sums.not_finite(enumerate(whole)),
        )
    if not sums.meet(exchange.are_read, "norm"):
        return UpdateVerdict.LOST
    if error is not None:
        raise error
    for (limit, own), norm in zip(limits, norms, strict=True):
        for totals in sums.groups(own) if math.isfinite(limit) else ():
            factor = limit / (norm.to(totals[0].device) + _TINY)
            torch._foreach_mul_(totals, torch.clamp(factor, max=1.0))
    return UpdateVerdict.GO_ON
