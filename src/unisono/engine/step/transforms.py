"""What happens between the sum of gradients and the update: unscale, ``on_gradients``, clip.

**Clipping** has the bits of torch's ``clip_grad_norm_`` and ``clip_grad_value_``. The norm is that
of the mean gradients of the whole global batch. Every worker computes it from all sums, in torch's
order, so it has the same bits everywhere; then each scales its own pieces, once everybody has
read::

    sum ── meet ── norm of everything ── meet ── scale my pieces, update

**Loss scaling** for float16 has the bits of torch's ``GradScaler``. Every worker unscales its
pieces of the sums and says whether they are finite; a step in which anybody's are not is skipped
by all. The scale then follows torch's rule, on every worker alike::

    loss × scale, backward, sum ── unscale my pieces ── all finite? ── clip, update   or   skip

**on_gradients** is code of the program: noise, surgery, logging. It sees the mean gradients of the
whole global batch, once a step, on every worker: all have the same and change them alike, so an
exchange whose workers each have all sums carries them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim import Optimizer
from torch.utils._foreach_utils import _group_tensors_by_device_and_dtype

from unisono.runtime.device import HOST, is_on_host
from unisono.runtime.forbidden import IN_AN_UPDATE, forbid

_TINY = 1e-6  # as torch's


def total_norm(tensors: list[torch.Tensor]) -> torch.Tensor:
    """Compute torch's norm of tensors; on several devices with the bits of one, on the first.

    torch's own puts the norms of all tensors in the order of their devices, then of their dtypes,
    and rounding depends on that order.
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
    """How gradients are clipped; not at all if both are None.

    Attributes:
        norm: the largest norm of all gradients together; infinite: the norm is computed, and
            nothing is scaled.
        value: the largest magnitude of each element.

    Raises:
        TypeError: one is not a number.
        ValueError: one is not above zero, or both are given.
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
                    f"`{name}=1.0`, say."
                )
            if not (limit > 0 and (math.isfinite(limit) or name == "clip_norm")):
                raise ValueError(
                    f"`{name}` must be above 0{' and finite' * (name == 'clip_value')}, but is "
                    f"{limit}: pass `{name}=1.0`, say, or leave it out."
                )
        if self.norm is not None and self.value is not None:
            raise ValueError(
                f"gradients can be clipped in one way, but both `clip_norm={self.norm}` and "
                f"`clip_value={self.value}` are given: leave one out."
            )

    def check_fits(self, optimizer: Optimizer) -> None:
        """Refuse to clamp what has no order.

        Raises:
            ValueError: a parameter is complex.
        """
        if self.value is None:
            return
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.is_complex():
                    raise ValueError(
                        f"`clip_value` takes real parameters alone, as torch's `clip_grad_value_` "
                        f"does, but the optimizer updates one of {parameter.dtype}: pass "
                        f"`clip_norm=1.0`, say."
                    )

    def clip_values(self, gradients: list[torch.Tensor]) -> None:
        """Clamp each element."""
        assert self.value is not None
        if gradients:
            torch._foreach_clamp_min_(gradients, -self.value)
            torch._foreach_clamp_max_(gradients, self.value)

    def scale(self, gradients: list[torch.Tensor], norm: torch.Tensor) -> None:
        """Scale some of the gradients whose norm all together is `norm`, a scalar."""
        assert self.norm is not None
        if gradients and math.isfinite(self.norm):
            torch._foreach_mul_(gradients, torch.clamp(self.norm / (norm + _TINY), max=1.0))


SMALLEST = 2.0**-16  # a step that is not finite even with this scale is an error


class LossScaling:
    """What torch's ``GradScaler`` does, in parts that several workers can do together. Final.

    Args:
        scaler: the user's; its scale is kept up to date, and its state is the run's.
    """

    def __init__(self, scaler: torch.amp.GradScaler) -> None:
        self._scaler = scaler

    @classmethod
    def of(cls, scaler: Any, optimizer: Optimizer) -> LossScaling | None:
        """Scale as a user's scaler does; None if there is none, or it is not enabled.

        Raises:
            TypeError: it is no ``GradScaler``.
            ValueError: the optimizer updates parameters in float16, whose gradients torch does not
                unscale either.
        """
        if scaler is None:
            return None
        if not isinstance(scaler, torch.amp.GradScaler):
            raise TypeError(
                f"`scaler` must be a torch.amp.GradScaler, but is of type "
                f'{type(scaler).__name__}: pass `torch.amp.GradScaler("cpu")`, say.'
            )
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        if any(parameter.dtype == torch.float16 for parameter in parameters):
            raise ValueError(
                "parameters must not be in float16 where the loss is scaled, but some are: keep "
                "the model in float32 (`model.float()`); autocast computes in float16 all the same."
            )
        return cls(scaler) if scaler.is_enabled() else None

    @property
    def scale(self) -> float:
        """What losses are multiplied by now."""
        return float(self._scaler.get_scale())

    @property
    def rule(self) -> dict[str, Any]:
        """How the scale starts and changes, as plain JSON, for the identity of a run."""
        state = self._scaler.state_dict()
        return {name: value for name, value in state.items() if not name.startswith("_")}

    def scaled(self, loss: torch.Tensor) -> torch.Tensor:
        """Multiply a loss by the scale."""
        if is_on_host(loss):
            return self._scaler.scale(loss)
        # The scale stays on the host, where it can be read without waiting.
        return loss * torch.full((), self.scale, dtype=torch.float32, device=loss.device)

    def unscale(self, gradients: list[torch.Tensor]) -> bool:
        """Divide gradients by the scale, in place.

        Returns:
            Whether all of them are finite.
        """
        if not gradients:
            return True
        device = gradients[0].device
        found = torch.zeros((), dtype=torch.float32, device=device)
        scale = torch.tensor(self.scale, dtype=torch.float32, device=HOST)
        # As torch: the reciprocal in float64, then rounded.
        rounded = scale.double().reciprocal().float().item()
        inverse = torch.full((), rounded, dtype=torch.float32, device=device)
        torch._amp_foreach_non_finite_check_and_unscale_(gradients, found, inverse)
        return not found.item()

    def update(self, *, is_skipped: bool) -> None:
        """Change the scale as torch does after a step."""
        state = self._scaler.state_dict()
        scale = torch.tensor(state["scale"], dtype=torch.float32, device=HOST)
        tracker = torch.tensor(state["_growth_tracker"], dtype=torch.int32, device=HOST)
        torch._amp_update_scale_(
            scale,
            tracker,
            torch.tensor(float(is_skipped), dtype=torch.float32, device=HOST),
            state["growth_factor"],
            state["backoff_factor"],
            state["growth_interval"],
        )
        self._scaler.load_state_dict(
            {**state, "scale": scale.item(), "_growth_tracker": int(tracker.item())}
        )


OnGradients = Callable[[int, dict[str, torch.Tensor]], Any]


class GradientHook:
    """Calls a program's function of the gradients. Final.

    Args:
        function: takes (step, gradients by name), changes them in place or returns others by name.
        names: of the parameters that the optimizer updates.
    """

    def __init__(self, function: OnGradients, names: Sequence[str]) -> None:
        self._function, self._names = function, names

    def call(self, step: int, sums: Sequence[torch.Tensor], present: Sequence[bool]) -> None:
        """Call it.

        Args:
            step: counted over the whole run.
            sums: the mean gradients, which are changed.
            present: for each parameter, whether it has a gradient in this step.

        Raises:
            TypeError: it returns something else than gradients by name.
            ValueError: one does not fit its parameter.
        """
        named = zip(self._names, sums, present, strict=True)
        gradients = {name: total for name, total, is_there in named if is_there}
        before = forbid(IN_AN_UPDATE)
        try:
            with torch.no_grad():
                returned = self._function(step, dict(gradients))
                if returned is not None:
                    self._take(gradients, returned)
        finally:
            forbid(before)

    def _take(self, gradients: Mapping[str, torch.Tensor], returned: Any) -> None:
        if not isinstance(returned, Mapping):
            raise TypeError(
                f"`on_gradients` must return None or gradients by name, but returned a "
                f"{type(returned).__name__}: change tensors in place, or return a dict of those "
                f"that are to take their place."
            )
        for name, gradient in returned.items():
            if name not in gradients:
                raise ValueError(
                    f"`on_gradients` must return gradients by the names that it is given, but "
                    f"returned {name!r}, which is none of the {len(gradients)}."
                )
            total = gradients[name]
            if not isinstance(gradient, torch.Tensor) or gradient.shape != total.shape:
                seen = getattr(gradient, "shape", type(gradient).__name__)
                raise ValueError(
                    f"`on_gradients` must return gradients of their parameters' shapes, but "
                    f"returned {seen!s} for {name!r}, whose shape is {tuple(total.shape)}."
                )
            if gradient is not total:
                total.copy_(gradient)
