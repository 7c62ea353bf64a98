"""How are sparse gradients averaged in the canonical order? Everybody gets all, and adds.

A sparse tensor here is one with some rows of a large one (what ``Embedding(sparse=True)`` gives).
A row that a rank does not have adds nothing, so where ranks touch different rows nothing is added
at all. Ranks have different numbers of rows; they tell these first.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from unisono.ddp.byte_gather import gather_bytes
from unisono.plan.summation import tree_sum


def sparse_mean_in_order(
    tensor: torch.Tensor, group: dist.ProcessGroup, divisor: int
) -> torch.Tensor:
    """Sum all ranks' sparse tensors, each divided by `divisor`, along the canonical tree.

    Collective: every rank of the group calls it.

    Args:
        tensor: sparse (COO), of one shape, dtype and number of sparse dimensions on all ranks.
        group: of any backend.
        divisor: the number of ranks that count.

    Returns:
        The sum, coalesced, on every rank.
    """
    own = tensor.coalesce()
    indices, values = own.indices(), own.values() * (1 / divisor)
    counts = _gather(torch.tensor([values.shape[0]], device=values.device), group)
    most = int(counts.max())
    all_indices = _gather(_padded(indices.t(), most), group)
    all_values = _gather(_padded(values, most), group)
    parts = [
        torch.sparse_coo_tensor(
            all_indices[rank, :count].t(),
            all_values[rank, :count],
            tensor.shape,
            is_coalesced=True,
            check_invariants=False,
        )
        for rank, count in enumerate(counts.view(-1).tolist())
    ]
    return tree_sum(parts, lambda one, other: (one + other).coalesce())


def _padded(rows: torch.Tensor, most: int) -> torch.Tensor:
    padded = rows.new_zeros(most, *rows.shape[1:])
    padded[: len(rows)] = rows
    return padded


def _gather(tensor: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Stack everybody's tensors of one shape, moved as bytes."""
    stacked = tensor.new_empty(group.size(), *tensor.shape)
    if tensor.numel():
        gather_bytes(stacked, tensor.contiguous(), group)
    return stacked
