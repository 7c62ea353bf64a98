"""What a user may ask for where the link between hosts is slow: fewer bytes, another result.

The shards of a run are in groups, by default one for each host. Inside of a group all is exact.
Between groups less is sent, so what comes out depends on the number of groups: it belongs to the
run's identity, and the number of workers does not.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch

from unisono.exchange.arena import Slot, lay_out
from unisono.plan.slices import cut, cut_whole
from unisono.whole import check_whole

Slots = Sequence[Slot]


@dataclass(frozen=True, slots=True, kw_only=True)
class SlowLink:
    """One of the ways to send less; use one of its subclasses.

    Args:
        groups: how many groups of shards there are; None: one for each host. On fewer hosts than
            groups a host computes several, with the same bits.

    Raises:
        TypeError, ValueError: an argument does not fit.
    """

    groups: int | None = None

    cut = staticmethod(cut)
    """Which pieces each worker adds up."""

    def __post_init__(self) -> None:
        if self.groups is not None:
            check_whole("groups", self.groups, at_least=2)

    @property
    def num_groups(self) -> int:
        """How many groups there are, once that is known."""
        assert self.groups is not None
        return self.groups

    def among(self, num_groups: int) -> Self:
        """Give the same with its number of groups."""
        return dataclasses.replace(self, groups=num_groups)

    def rows(self, parameters: Slots, states: Slots) -> dict[str, Slots]:
        """Say by label what is kept from step to step.

        Args:
            parameters: where each parameter lies among all.
            states: where each tensor of the optimizer's state does.
        """
        raise NotImplementedError

    @property
    def begin_as_parameters(self) -> Sequence[str]:
        """Name what begins as the parameters; all else begins as zeros."""
        return ()

    def sent(self, parameters: Slots) -> tuple[float, int]:
        """Say what crosses in a step, in the mean of many.

        Returns:
            How much of the exact gradients' bytes, which hosts add up; and how many bytes each host
            sends to each other one.
        """
        raise NotImplementedError


@dataclass(frozen=True, slots=True, kw_only=True)
class Bf16Gradients(SlowLink):
    """Send gradients between groups rounded to bfloat16, in half the bytes. Final.

    What rounding takes away is kept and added in the next step (error feedback): of each group's
    sum before it is sent, and of the sum of all before it is given to all, as in DoubleSqueeze
    (Tang et al. 2019). Parameters, the optimizer and its state stay as exact as they are.

    Args:
        groups: how many groups of shards there are; None: one for each host. On fewer hosts than
            groups a host computes several, with the same bits.

    Raises:
        TypeError, ValueError: an argument does not fit.
    """

    def rows(self, parameters: Slots, states: Slots) -> dict[str, Slots]:
        """See :class:`SlowLink`."""
        labels = [*map(residual_of, range(self.num_groups)), RESIDUAL_OF_ALL]
        return dict.fromkeys(labels, parameters)

    def sent(self, parameters: Slots) -> tuple[float, int]:
        """See :class:`SlowLink`."""
        return 0.5, 0


@dataclass(frozen=True, slots=True, kw_only=True)
class DiLoCo(SlowLink):
    """Let each group take steps of its own, and send parameters every so many steps. Final.

    As in DiLoCo (Douillard et al. 2023): each group updates parameters of its own, with your
    optimizer and the gradients of its shards. After `local_steps` steps, what groups have changed
    is averaged, and an outer step of SGD with Nesterov's momentum applies it to the model's
    parameters, from which groups go on. In between, the model (for validation, checkpoints, the
    digest) has the parameters of the last outer step.

    Args:
        local_steps: H, from one outer step to the next, counted over the whole run.
        outer_lr: the learning rate of the outer step.
        outer_momentum: its momentum; 0: none.
        groups: how many groups of shards there are; None: one for each host. On fewer hosts than
            groups a host computes several, with the same bits.

    Raises:
        TypeError, ValueError: an argument does not fit.
    """

    local_steps: int
    outer_lr: float = 0.7
    outer_momentum: float = 0.9

    def __post_init__(self) -> None:
        SlowLink.__post_init__(self)
        check_whole("local_steps", self.local_steps, at_least=1)
        for name, value, below in (
            ("outer_lr", self.outer_lr, math.inf),
            ("outer_momentum", self.outer_momentum, 1.0),
        ):
            if isinstance(value, bool) or not isinstance(value, (int, float)):
                raise TypeError(f"`{name}` must be a number, but is {value!r}.")
            if not 0 <= value < below or (name == "outer_lr" and not value):
                bounds = "above 0" if below == math.inf else "at least 0 and below 1"
                raise ValueError(f"`{name}` must be {bounds}, but is {value!r}: leave it out.")

    def rows(self, parameters: Slots, states: Slots) -> dict[str, Slots]:
        """See :class:`SlowLink`."""
        numbers, known = range(self.num_groups), (_flags(len(parameters)),)
        return {
            OUTER_MOMENTUM: parameters,
            **{parameters_of(number): parameters for number in numbers},
            **{states_of(number): states for number in numbers},
            **{known_of(number): known for number in numbers},
        }

    @property
    def begin_as_parameters(self) -> Sequence[str]:
        """See :class:`SlowLink`."""
        return [parameters_of(number) for number in range(self.num_groups)]

    def sent(self, parameters: Slots) -> tuple[float, int]:
        """See :class:`SlowLink`."""
        return 1 / self.local_steps, 0


@dataclass(frozen=True, slots=True, kw_only=True)
class PowerSGD(SlowLink):
    """Send two thin factors in the place of each matrix of gradients. Final.

    As in PowerSGD (Vogels et al. 2019): an n × m matrix is sent as `rank` · (n + m) numbers, by one
    step of power iteration that begins where the last one ended. What the factors leave out is kept
    for each group and added in the next step. Tensors with more dimensions are matrices of as many
    rows as their first; vectors, and matrices that would not get smaller, are sent as they are.

    Args:
        rank: r, of the factors.
        start_step: until this step all is sent as it is; early gradients change most.
        groups: how many groups of shards there are; None: one for each host. On fewer hosts than
            groups a host computes several, with the same bits.

    Raises:
        TypeError, ValueError: an argument does not fit.
    """

    rank: int = 4
    start_step: int = 100

    cut = staticmethod(cut_whole)

    def __post_init__(self) -> None:
        SlowLink.__post_init__(self)
        check_whole("rank", self.rank, at_least=1)
        check_whole("start_step", self.start_step, at_least=0)

    def rows(self, parameters: Slots, states: Slots) -> dict[str, Slots]:
        """See :class:`SlowLink`."""
        labels = map(residual_of, range(self.num_groups))
        factors = {}
        for slot in parameters:
            shape = matrix_of(slot, self.rank)
            thin = (0, self.rank) if shape is None else (shape[1], self.rank)
            factors[slot.name] = torch.empty(thin, dtype=slot.dtype, device="meta")
        return {**dict.fromkeys(labels, parameters), FACTOR: lay_out(factors)}

    def sent(self, parameters: Slots) -> tuple[float, int]:
        """See :class:`SlowLink`; after `start_step`."""
        shapes = [matrix_of(slot, self.rank) for slot in parameters]
        numel = sum(slot.numel for slot in parameters)
        whole = sum(slot.numel for slot, shape in zip(parameters, shapes, strict=True) if not shape)
        thin = sum(self.rank * sum(shape) for shape in shapes if shape)
        return whole / max(numel, 1), torch.float32.itemsize * thin


def matrix_of(slot: Slot, rank: int) -> tuple[int, int] | None:
    """Say as which matrix a parameter is sent in factors, as it lies; None: as it is."""
    if len(slot.shape) < 2 or not slot.numel:
        return None
    rows = slot.shape[max(range(len(slot.shape)), key=slot.stride.__getitem__)]
    columns = slot.numel // rows
    return (rows, columns) if rank * (rows + columns) < slot.numel else None


KINDS: Mapping[str, str] = {
    "Bf16Gradients": "Bf16Gradients()",
    "PowerSGD": "PowerSGD(rank=4)",
    "DiLoCo": "DiLoCo(local_steps=50)",
}
RESIDUAL_OF_ALL = "residual of the sum"
FACTOR = "factors"
OUTER_MOMENTUM = "outer momentum"


def check_slow_link(link: Any) -> None:
    """Refuse what is no way to send less, with TypeError."""
    if not isinstance(link, SlowLink) or type(link) is SlowLink:
        given = f"`unisono.{link.__name__}`" if isinstance(link, type) else repr(link)
        examples = " or ".join(f"`slow_link=unisono.{example}`" for example in KINDS.values())
        raise TypeError(
            f"`slow_link` must be an object of {', '.join(KINDS)}, or None, but is {given}: pass "
            f"{examples}, for example."
        )


def residual_of(group: int) -> str:
    """Name what rounding has taken from the sum of a group."""
    return f"residual of group {group}"


def parameters_of(group: int) -> str:
    """Name a group's own parameters."""
    return f"parameters of group {group}"


def states_of(group: int) -> str:
    """Name a group's own state of the optimizer."""
    return f"optimizer of group {group}"


def known_of(group: int) -> str:
    """Name which parameters have state in a group: a byte for each, 1 for those."""
    return f"state of group {group}"


def _flags(number: int) -> Slot:
    return Slot("known", 0, (number,), (1,), torch.uint8, number)
