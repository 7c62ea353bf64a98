"""What a user may ask for where the link between hosts is slow: fewer bytes, another result.

The shards of a run are in groups, by default one for each host. Inside of a group all is exact.
Between groups less is sent, so what comes out depends on the number of groups: it belongs to the
run's identity, and the number of workers does not.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

from unisono.whole import check_whole


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

    def __post_init__(self) -> None:
        if self.groups is not None:
            check_whole("groups", self.groups, at_least=2)

    def among(self, num_groups: int) -> Self:
        """Give the same with its number of groups."""
        return dataclasses.replace(self, groups=num_groups)

    def labels(self, num_parameters: int) -> Sequence[str]:
        """Name what is kept for each parameter, from step to step."""
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

    def labels(self, num_parameters: int) -> Sequence[str]:
        """See :class:`SlowLink`."""
        assert self.groups is not None
        return [*map(residual_of, range(self.groups)), RESIDUAL_OF_ALL]


def check_slow_link(link: Any) -> None:
    """Refuse what is no way to send less, with TypeError."""
    if not isinstance(link, SlowLink) or type(link) is SlowLink:
        given = f"`unisono.{link.__name__}`" if isinstance(link, type) else repr(link)
        raise TypeError(
            f"`slow_link` must be one of {', '.join(KINDS)}, or None, but is {given}: pass "
            f"`slow_link=unisono.{KINDS[0]}()`, for example."
        )


KINDS = ("Bf16Gradients",)
RESIDUAL_OF_ALL = "residual of the sum"


def residual_of(group: int) -> str:
    """Name what rounding has taken from the sum of a group."""
    return f"residual of group {group}"
