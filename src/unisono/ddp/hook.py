"""The hook that averages each bucket of a DDP model's gradients in the canonical order.

torch takes one hook per model for good. Ours is registered at the start, so a hook that a program
registers later is kept here, and runs instead.

On CPUs a bucket's exchange is finished when the hook returns. Finishing it during the backward pass
was as fast or slower at the usual bucket size, since backward passes and gloo want the same cores.
On NCCL all of it is only enqueued on streams, in the same order on every rank.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import GradBucket

from unisono.ddp.averaging import (
    begin_mean,
    mean_in_order,
    sparse_mean_in_order,
    sums_in_order,
)

Hook = Callable[[Any, GradBucket], "torch.futures.Future[torch.Tensor]"]


class InOrder:
    """How one model's buckets are averaged. Final.

    Attributes:
        group: between which ranks.
        divisor: how many of them count; fewer than all only inside of ``join``.
        replacement: a hook of the program and its state.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.divisor = group.size()
        self.replacement: tuple[Hook, Any] | None = None


def average(state: InOrder, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Average one bucket. Collective: every rank calls it, for its buckets in their order."""
    if state.replacement is not None:
        hook, its_state = state.replacement
        return hook(its_state, bucket)
    tensor, group = bucket.buffer(), state.group
    if tensor.is_sparse:
        return _done(sparse_mean_in_order(tensor, group, state.divisor))
    if _is_on_streams(tensor, group) and not sums_in_order(group):
        return _average_on_streams(tensor, group, state.divisor)
    mean_in_order(tensor, group, state.divisor)
    return _done(tensor)


def _average_on_streams(
    tensor: torch.Tensor, group: dist.ProcessGroup, divisor: int
) -> torch.futures.Future[torch.Tensor]:
    """Average on NCCL's streams. Not run yet: it needs several GPUs.

    The future of the all_to_all is complete as soon as that is enqueued, so what comes after it is
    enqueued at once, by the same thread, on a stream that waits for it; and DDP waits for that.
    """
    work, finish = begin_mean(tensor, group, divisor)

    def then_finish(_: object) -> torch.Tensor:
        work.wait()  # the stream, not the thread
        finish()
        return tensor

    future: torch.futures.Future[torch.Tensor] = work.get_future().then(then_finish)
    return future


def _is_on_streams(tensor: torch.Tensor, group: dist.ProcessGroup) -> bool:
    return tensor.is_cuda and group._get_backend(tensor.device).name() == "nccl"


def _done(tensor: torch.Tensor) -> torch.futures.Future[torch.Tensor]:
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    future.set_result(tensor)
    return future
