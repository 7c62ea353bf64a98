"""How do ranks hear everybody's tensor? As bytes, by whatever name this version of torch has."""

from __future__ import annotations

import torch
import torch.distributed as dist


def gather_bytes(output: torch.Tensor, tensor: torch.Tensor, group: dist.ProcessGroup) -> None:
    """Put everybody's tensors behind each other. Collective: every rank of the group calls it.

    Args:
        output: contiguous; as large as all of them together.
        tensor: contiguous, of one shape and dtype on all ranks, which no library needs to know.
        group: of any backend.
    """
    # torch 2.13 gave it this name; before, it was the other one, which warns now.
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    gather(as_bytes(output), as_bytes(tensor), group=group)


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """View a contiguous tensor as bytes in a row: every library moves these."""
    return tensor.view(-1).view(torch.uint8)
