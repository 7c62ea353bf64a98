"""How is a tensor averaged in the canonical order, whatever order the group's library sums in?

Where the library's own sum *is* canonical, it is asked for: the backend ``unisono`` adds along the
tree of :mod:`unisono.plan.summation`, and of two numbers there is only one sum. Everywhere else
the library moves bytes and we add::

    rank 0   a₀ a₁ a₂ ─┐               ┌─ a₀ b₀ c₀ → (a₀ + b₀) + c₀ ─┐
    rank 1   b₀ b₁ b₂ ─┤  all_to_all   ├─ a₁ b₁ c₁ → (a₁ + b₁) + c₁ ─┤  all_gather: all three
    rank 2   c₀ c₁ c₂ ─┘               └─ a₂ b₂ c₂ → (a₂ + b₂) + c₂ ─┘

Each rank sends and receives what it would in a ring. The elements that are left when a tensor is
cut into W equal slices travel with every slice, so everybody adds them up for itself.

Every element is multiplied by 1/W, rounded to its dtype, before it is added: that is what torch's
DDP does, so its bits on the backend ``unisono`` are these bits too.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from unisono.c10d.group import Group
from unisono.c10d.reduction import combine
from unisono.ddp.byte_gather import as_bytes, gather_bytes


def sums_in_order(group: dist.ProcessGroup) -> bool:
    """Tell whether the group's own all_reduce adds dense tensors in the canonical order."""
    return isinstance(group, Group) or group.size() <= 2


def mean_in_order(tensor: torch.Tensor, group: dist.ProcessGroup, divisor: int) -> None:
    """Replace a tensor by the canonical sum of all ranks' tensors, each divided by `divisor`.

    Collective: every rank of the group calls it.

    Args:
        tensor: dense and contiguous, of one shape and dtype on all ranks.
        group: of any backend.
        divisor: the number of ranks that count.
    """
    if sums_in_order(group):
        dist.all_reduce(tensor.mul_(1 / divisor), group=group)
    else:
        exchange = send_slices(tensor, group, divisor)
        exchange.work.wait()
        share_sums(exchange, group)


class SlicesUnderWay:
    """A vector whose slices are on their way. Final.

    Attributes:
        vector: what is averaged; it gets the result.
        num_even: how many of its elements are in slices; the rest goes to everybody.
        sent: a row for each rank, its slice and the rest; kept until it has been sent.
        arrived: a row from each rank, once `work` is done.
        work: the all_to_all.
    """

    def __init__(self, vector: torch.Tensor, num_ranks: int) -> None:
        each, rest = divmod(vector.numel(), num_ranks)
        self.vector = vector
        self.num_even = each * num_ranks
        self.sent = vector.new_empty(num_ranks, each + rest)
        self.arrived = torch.empty_like(self.sent)
        self.work: Any = None


def send_slices(tensor: torch.Tensor, group: dist.ProcessGroup, divisor: int) -> SlicesUnderWay:
    """Send each rank its slice of a tensor, divided. Collective: every rank calls it."""
    exchange = SlicesUnderWay(tensor.view(-1), group.size())
    vector, sent, even = exchange.vector, exchange.sent, exchange.num_even
    each, scale = even // group.size(), 1 / divisor
    if even:
        torch.mul(vector[:even].view(-1, each), scale, out=sent[:, :each])
    sent[:, each:] = vector[even:] * scale
    exchange.work = dist.all_to_all_single(
        as_bytes(exchange.arrived), as_bytes(sent), group=group, async_op=True
    )
    return exchange


def share_sums(exchange: SlicesUnderWay, group: dist.ProcessGroup) -> None:
    """Add the slices that have arrived and give everybody the sums.

    Collective: every rank calls it. The tensor that :func:`send_slices` was given has the result.
    """
    vector, even = exchange.vector, exchange.num_even
    each = even // group.size()
    total = torch.empty_like(exchange.arrived[0])
    combine("SUM", exchange.arrived.unbind(), total)
    if even:
        gather_bytes(vector[:even], total[:each], group)
    vector[even:] = total[each:]
