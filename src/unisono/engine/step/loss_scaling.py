"""Scale losses, for float16, with the bits of torch's ``GradScaler``.

Every worker unscales its pieces of the sums and reports whether they are finite; if any are not,
all workers skip the step. The scale then follows torch's rule, on every worker alike::

    loss × scale, backward, sum ── unscale my pieces ── all finite? ── clip, update   or   skip
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any, final

import torch
from torch.optim import Optimizer

from unisono.engine.step.transforms import Sums, UpdateVerdict
from unisono.errors import NonFiniteLossError
from unisono.runtime.device import HOST, is_on_host

SMALLEST = 2.0**-16  # a step that is not finite even with this scale is an error


@final
class LossScaling:
    """The operations of torch's ``GradScaler``, in parts that several workers do together.

    The user's `scaler` is kept up to date, and its state is saved with the run.
    """

    def __init__(self, scaler: torch.amp.GradScaler) -> None:
        self._scaler = scaler

    @classmethod
    def of(cls, scaler: Any, optimizer: Optimizer) -> LossScaling | None:
        """Return the scaling of a user's scaler, or None if there is none or it is disabled."""
        if scaler is None:
            return None
        if not isinstance(scaler, torch.amp.GradScaler):
            raise TypeError(
                f"`scaler` must be a torch.amp.GradScaler, but is of type "
                f'{type(scaler).__name__}: pass `torch.amp.GradScaler("cpu")`, for example.'
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
        """The factor by which losses are multiplied now."""
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

    def __call__(self, sums: Sums) -> UpdateVerdict:
        """Unscale this worker's pieces; if any worker's are not finite, all skip the update."""
        exchange = sums.exchange
        are_finite = [self.unscale(totals) for totals in sums.groups()]
        mine = b"finite" if all(are_finite) else b""
        heard = sums.meet(functools.partial(exchange.agree, mine), "scale")
        if heard is None:
            return UpdateVerdict.LOST
        if all(heard):
            return UpdateVerdict.GO_ON
        if self.scale <= SMALLEST:
            pieces = zip(exchange.pieces, exchange.totals, strict=True)
            shard, value = (None, math.nan) if sums.bad is None else sums.bad
            because = "" if sums.bad is None else f" (the loss of shard {shard} is {value})"
            raise NonFiniteLossError(
                f"gradients must become finite as the scale of the loss falls, but in step "
                f"{sums.step} they are not{because}, though it has come down to {self.scale:g}; "
                f"the parameters are those from before the steps that were skipped: look for "
                f"values that are not finite in the samples and in the model, or compute in "
                f"bfloat16, which overflows as late as float32.",
                step=sums.step,
                shard=shard,
                value=value,
                parameters=sums.not_finite((piece.index, total) for piece, total in pieces),
            )
        sums.norm = math.inf if sums.has_norm else None
        return UpdateVerdict.SKIP

    def unscale(self, gradients: list[torch.Tensor]) -> bool:
        """Divide gradients by the scale, in place; return whether all of them are finite."""
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


def check_alone(names: Sequence[str]) -> None:
    """Raise ValueError if one loss would be scaled for several optimizers of these names."""
    if len(names) > 1:
        raise ValueError(
            f"losses are scaled for one optimizer at a time where `scaler` is given, but this "
            f"update is of several: compute each loss in a separate update, such as "
            f"`with step.update({names[0]!r}):`."
        )
