"""Averages tensors in the canonical order, even if the group's library sums in another order.

If the library's own sum is canonical, it is used: two numbers have only one sum, and the backend
``unisono`` adds along the tree of :mod:`unisono.plan.summation`. Otherwise ranks exchange slices::

    rank 0   a₀ a₁ a₂ ─┐               ┌─ a₀ b₀ c₀ → (a₀ + b₀) + c₀ ─┐
    rank 1   b₀ b₁ b₂ ─┤  all_to_all   ├─ a₁ b₁ c₁ → (a₁ + b₁) + c₁ ─┤  all_gather: all three
    rank 2   c₀ c₁ c₂ ─┘               └─ a₂ b₂ c₂ → (a₂ + b₂) + c₂ ─┘

Each rank sends and receives as much as in a ring. The elements left over when a tensor is cut into
W equal slices are sent with every slice, so each rank adds them itself. Every element is multiplied
by 1/W, rounded to its dtype, before it is added, as in torch's DDP. Sparse rows are all gathered.

A hook averages a DDP model's buckets in this way. torch accepts only one hook per model, for good.
Ours is registered at the start; if the program registers a hook later, ours calls it instead of
averaging. On CPUs a bucket's exchange is finished when the hook returns: finishing it later was not
faster. On NCCL all operations are only enqueued on streams, in the same order on every rank.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, final

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import GradBucket

from unisono.plan.summation import tree_sum
from unisono.runtime.c10d.collectives import combine
from unisono.runtime.c10d.group import Group


def sums_in_order(group: dist.ProcessGroup) -> bool:
    """Return whether the group's own all_reduce adds dense tensors in the canonical order."""
    return isinstance(group, Group) or group.size() <= 2


def mean_in_order(tensor: torch.Tensor, group: dist.ProcessGroup, divisor: int) -> None:
    """Replace a contiguous tensor by the canonical sum over all ranks, each divided by `divisor`.

    Collective: every rank of the group calls it, with the same shape and dtype.
    """
    if sums_in_order(group):
        dist.all_reduce(tensor.mul_(1 / divisor), group=group)
    else:
        work, finish = begin_mean(tensor, group, divisor)
        work.wait()
        finish()


def begin_mean(
    tensor: torch.Tensor, group: dist.ProcessGroup, divisor: int
) -> tuple[dist.Work, Callable[[], None]]:
    """Start to average a tensor with a library that only moves bytes.

    Returns a Work, and a function that every rank must call once the Work is done: it stores the
    mean in `tensor`. Collective, as :func:`mean_in_order`.
    """
    num_ranks, vector, scale = group.size(), tensor.view(-1), 1 / divisor
    each, rest = divmod(vector.numel(), num_ranks)
    even = vector[: each * num_ranks]
    sent = vector.new_empty(num_ranks, each + rest)
    if each:
        torch.mul(even.view(num_ranks, each), scale, out=sent[:, :each])
    sent[:, each:] = vector[len(even) :] * scale
    arrived = torch.empty_like(sent)
    work: Any = dist.all_to_all_single(
        _as_bytes(arrived), _as_bytes(sent), group=group, async_op=True
    )

    def finish() -> None:
        total = torch.empty_like(sent[0])  # also keeps `sent` until it has been sent
        combine("SUM", arrived.unbind(), total)
        if each:
            gather_bytes(even, total[:each], group)
        vector[len(even) :] = total[each:]

    return work, finish


def sparse_mean_in_order(
    tensor: torch.Tensor, group: dist.ProcessGroup, divisor: int
) -> torch.Tensor:
    """Return all ranks' sparse tensors, each divided by `divisor`, summed along the canonical tree.

    Collective.
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


def gather_bytes(output: torch.Tensor, tensor: torch.Tensor, group: dist.ProcessGroup) -> None:
    """Concatenate all ranks' contiguous tensors, of any dtype. Collective."""
    parts = list(_as_bytes(output).chunk(group.size()))
    dist.all_gather(parts, _as_bytes(tensor), group=group)


def _as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return a contiguous tensor's bytes as a vector, which every library can move."""
    return tensor.view(-1).view(torch.uint8)


def _padded(rows: torch.Tensor, most: int) -> torch.Tensor:
    padded = rows.new_zeros(most, *rows.shape[1:])
    padded[: len(rows)] = rows
    return padded


def _gather(tensor: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    stacked = tensor.new_empty(group.size(), *tensor.shape)
    if tensor.numel():
        gather_bytes(stacked, tensor.contiguous(), group)
    return stacked


Hook = Callable[[Any, GradBucket], "torch.futures.Future[torch.Tensor]"]


@final
class InOrder:
    """How to average one model's buckets, or the program's hook that does so instead.

    `divisor` is the number of ranks that count: fewer than all only inside of ``join``.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.divisor = group.size()
        self.replacement: tuple[Hook, Any] | None = None


def average(state: InOrder, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Average one bucket. Collective: every rank calls it, for its buckets in order."""
    if state.replacement is not None:
        hook, its_state = state.replacement
        return hook(its_state, bucket)
    tensor, group = bucket.buffer(), state.group
    if tensor.is_sparse:
        return _done(sparse_mean_in_order(tensor, group, state.divisor))
    is_on_streams = tensor.is_cuda and group._get_backend(tensor.device).name() == "nccl"
    if is_on_streams and not sums_in_order(group):
        return _average_on_streams(tensor, group, state.divisor)
    mean_in_order(tensor, group, state.divisor)
    return _done(tensor)


def _average_on_streams(
    tensor: torch.Tensor, group: dist.ProcessGroup, divisor: int
) -> torch.futures.Future[torch.Tensor]:
    """Average on NCCL's streams. Not run yet: it needs several GPUs.

    The future of the all_to_all is complete as soon as it is enqueued, so the same thread enqueues
    the rest at once, on a stream that waits for it, and DDP waits for that stream.
    """
    work, finish = begin_mean(tensor, group, divisor)

    def then_finish(_: object) -> torch.Tensor:
        work.wait()  # blocks the stream, not the thread
        finish()
        return tensor

    future: torch.futures.Future[torch.Tensor] = work.get_future().then(then_finish)
    return future


def _done(tensor: torch.Tensor) -> torch.futures.Future[torch.Tensor]:
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    future.set_result(tensor)
    return future
