"""Convert what a loss function returns to a tensor to differentiate and sums to average.

A loss function returns, for one shard,

* a scalar: the mean over the shard's samples, or
* a pair ``(sum, weight)``: the mean is then taken over the true global weight (e.g. of tokens);
  with the weight None, the sum over the global batch is not divided; or
* a dict with ``"loss"`` (either of the two) and further scalars or pairs, averaged the same way;
  those that are integers or booleans are counts, and are added up. In it, ``"per_sample"`` is a
  dict of tensors with a row for each sample, which are gathered.

Reading one number makes the host wait for all work of an accelerator. So the numbers of all shards
are copied together, once the passes of all shards have been issued.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, final

import numpy as np
import torch

from unisono.runtime.arrivals import pinned
from unisono.runtime.device import HOST, Copies

PER_SAMPLE = "per_sample"
_COUNT = "\0"  # before the names of counts


@dataclass(frozen=True, slots=True)
class OnDevice:
    """A number that is still on an accelerator: the value of a tensor, times a factor."""

    tensor: torch.Tensor
    times: int


Scalar = float | OnDevice


@dataclass(frozen=True, slots=True)
class ShardLoss:
    """One shard's loss."""

    tensor: torch.Tensor  # what to differentiate: the mean, or the sum of a pair
    is_sum: bool  # whether it is the sum of a pair
    # by name (`"loss"` first; of counts: see `name_of`) the sum over the shard and its weight
    scalars: dict[str, tuple[Scalar, Scalar]]
    # by name, tensors with a row for each sample of the shard
    per_sample: dict[str, torch.Tensor] = field(default_factory=dict)

    @property
    def on_device(self) -> list[OnDevice]:
        """The numbers that have not been read yet."""
        pairs = self.scalars.values()
        return [number for pair in pairs for number in pair if isinstance(number, OnDevice)]

    def numbers(self) -> dict[str, tuple[float, float]]:
        """Return :attr:`scalars` as numbers; waits for the device."""
        here = self.with_numbers(number.tensor.item() for number in self.on_device)
        return here.scalars  # type: ignore[return-value]

    def with_numbers(self, numbers: Iterator[float]) -> ShardLoss:
        """Replace the numbers of :attr:`on_device` by these values, in that order."""
        scalars: dict[str, tuple[Scalar, Scalar]] = {}
        for name, pair in self.scalars.items():
            total, weight = (
                next(numbers) * one.times if isinstance(one, OnDevice) else one for one in pair
            )
            scalars[name] = (total, _checked_weight(name, weight))
        return replace(self, scalars=scalars)


def read_loss(value: Any, num_samples: int, *, is_first: bool = True) -> ShardLoss:
    """Convert one shard's loss to a common form; `num_samples` is the weight of means.

    Sums without a weight are divided by 1, that of the step's first shard: the others have 0.
    """
    values = value if isinstance(value, Mapping) else {"loss": value}
    if "loss" not in values:
        raise TypeError(
            f'a loss function that returns a dict must have "loss" in it, but the keys are '
            f'{list(values)}: name the value to minimise "loss".'
        )
    loss = values["loss"]
    is_sum = is_pair(loss)
    tensor = loss[0] if is_sum else loss
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(
            f"a loss function must return a scalar tensor, (sum, weight) or a dict, but returned "
            f"{type(tensor).__name__}: return the batch's mean loss, as `F.cross_entropy` does"
            f"{', and have labels in the batch if the model computes it' * (tensor is None)}."
        )
    alone = float(is_first)
    scalars = {"loss": _sum_and_weight("loss", loss, num_samples, alone)}
    for name, other in values.items():
        if name in ("loss", PER_SAMPLE):
            continue
        if is_count(other):
            scalars[f"{_COUNT}{name}"] = _number(str(name), other), 1.0
        else:
            scalars[str(name)] = _sum_and_weight(str(name), other, num_samples, alone)
    rows = _rows(values[PER_SAMPLE], num_samples) if PER_SAMPLE in values else {}
    return ShardLoss(tensor, is_sum, scalars, rows)


def _rows(values: Any, num_samples: int) -> dict[str, torch.Tensor]:
    is_named = isinstance(values, Mapping)
    for name, value in values.items() if is_named else [("it", values)]:
        is_tensor = isinstance(value, torch.Tensor)
        if not (is_named and is_tensor and value.ndim and len(value) == num_samples):
            seen = tuple(value.shape) if is_tensor else type(value).__name__
            raise TypeError(
                f'`"{PER_SAMPLE}"` of a loss function must be a dict of tensors with a row for '
                f"each of the {num_samples} samples, but {name!r} is {seen}: compute the loss of "
                f'each sample (`reduction="none"`), for example.'
            )
    # Copies: a model may write to the same memory in its next pass.
    return {str(name): value.detach().clone() for name, value in values.items()}


def name_of(key: str) -> tuple[str, bool]:
    """Return the name of a scalar, and whether it is a count, from its key in `scalars`."""
    return key.removeprefix(_COUNT), key.startswith(_COUNT)


def is_known_bad(loss: ShardLoss) -> bool:
    """Return whether a loss is already known to be NaN or infinite."""
    total = loss.scalars["loss"][0]
    return not isinstance(total, OnDevice) and not math.isfinite(total)


def check_differentiable(loss: ShardLoss) -> None:
    """Raise ValueError if a loss does not depend on any parameter."""
    if not loss.tensor.requires_grad:
        raise ValueError(
            "the loss must depend on the model's parameters, but has no gradient: compute it from "
            "the model's output, without `.item()`, `.detach()` or `torch.no_grad()`."
        )


def is_pair(value: Any) -> bool:
    """Return whether a value is a sum and its weight."""
    return isinstance(value, tuple) and len(value) == 2


def is_of_whole_batch(value: Any) -> bool:
    """Return whether a loss function returned a sum without a weight, which nothing divides."""
    loss = value.get("loss") if isinstance(value, Mapping) else value
    return isinstance(loss, tuple) and is_pair(loss) and loss[1] is None


def is_count(value: Any) -> bool:
    """Return whether a scalar is of an integer or boolean type."""
    if isinstance(value, torch.Tensor):
        return not (value.is_floating_point() or value.is_complex())
    return not isinstance(value, (float, tuple)) and np.asarray(value).dtype.kind in "biu"


def _sum_and_weight(name: str, value: Any, num_samples: int, alone: float) -> tuple[Scalar, Scalar]:
    if not is_pair(value):
        return _number(name, value, num_samples), float(num_samples)
    if value[1] is None:
        return _number(name, value[0]), alone
    if isinstance(value[1], torch.Tensor) and value[1].numel() != 1:
        raise ValueError(
            f"a pair that a loss function returns must be (sum, weight), but the weight of {name} "
            f"has shape {tuple(value[1].shape)}: return the loss alone, without the outputs."
        )
    weight = _number(f"the weight of {name}", value[1])
    if not isinstance(weight, OnDevice):
        _checked_weight(name, weight)
    return _number(name, value[0]), weight


def _checked_weight(name: str, weight: float) -> float:
    if not weight >= 0:
        raise ValueError(f"the weight of {name} must be at least 0, but is {weight}.")
    return weight


def _number(name: str, value: Any, times: int = 1) -> Scalar:
    if isinstance(value, torch.Tensor) and value.numel() != 1:
        raise ValueError(
            f"{name} must be a scalar, but has shape {tuple(value.shape)}: take the mean over the "
            f"batch (`.mean()`), return (sum, weight), or of a model's output the loss alone."
        )
    if isinstance(value, torch.Tensor) and value.device.type != HOST and not value.is_complex():
        # A copy: the program may continue counting in the same tensor.
        return OnDevice(value.detach().reshape(()).to(torch.float64, copy=True), times)
    try:
        return float(value.item() if isinstance(value, torch.Tensor) else value) * times
    except (TypeError, ValueError, RuntimeError):
        kind = value.dtype if isinstance(value, torch.Tensor) else type(value).__name__
        raise TypeError(
            f"{name} must be a real number or a tensor with one, but is of type {kind}: return "
            f"the mean over the batch."
        ) from None


@final
class PendingLosses:
    """The losses of a step, by shard, whose numbers are still on an accelerator."""

    def __init__(self, copies: Copies) -> None:
        self._copies = copies
        self.losses: list[tuple[int, ShardLoss]] = []
        self._host = torch.empty(0, dtype=torch.float64, device=HOST)

    def read(self) -> Iterator[tuple[int, ShardLoss]]:
        """Yield every shard's loss with its numbers, once all are copied; waits for the device."""
        losses, self.losses = self.losses, []
        tensors = [number.tensor for _, loss in losses for number in loss.on_device]
        if self._host.numel() != len(tensors):
            self._host = pinned(torch.empty(len(tensors), dtype=torch.float64, device=HOST))
        order: Sequence[int] = range(len(tensors))
        if tensors:  # a program may have brought all to the host
            together, order = _together(tensors, self._copies.device)
            self._copies.to_host(self._host, together)
            self._copies.wait()
        read = dict(zip(order, self._host.tolist(), strict=True))
        numbers = iter([read[at] for at in range(len(tensors))])
        for shard, loss in losses:
            yield shard, loss.with_numbers(numbers)


def _together(
    tensors: Sequence[torch.Tensor], device: torch.device
) -> tuple[torch.Tensor, Sequence[int]]:
    """Stack numbers in one vector on a device, and return the index of each."""
    places = defaultdict(list)
    for at, tensor in enumerate(tensors):
        places[tensor.device].append(at)
    stacks = [torch.stack([tensors[at] for at in each]).to(device) for each in places.values()]
    return stacks[0] if len(stacks) == 1 else torch.cat(stacks), sum(places.values(), [])
