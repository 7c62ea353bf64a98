"""torch's DistributedDataParallel with the canonical order of summation.

Before a model's first exchange all ranks check that they have the same model. torch compares with
rank 0's model and raises on the ranks that differ, while rank 0 waits. Here all compare and raise.
"""

from __future__ import annotations

import functools
import inspect
import warnings
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import BuiltinCommHookType, _register_comm_hook
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from unisono.distributed.averaging import Hook, InOrder, average, mean_in_order, sums_in_order
from unisono.errors import MismatchError
from unisono.runtime.c10d.group import Group
from unisono.runtime.dtypes import dtype_name
from unisono.runtime.launch.group_lifetime import free_group_last

_TorchDDP: Any = TorchDDP  # which is untyped
_BUILTIN_HOOKS = {
    BuiltinCommHookType.ALLREDUCE: default_hooks.allreduce_hook,
    BuiltinCommHookType.FP16_COMPRESS: default_hooks.fp16_compress_hook,
}
_HOOKS_OF_TORCH = "torch.distributed.algorithms.ddp_comm_hooks"
_WITH_ORDERS_OF_THEIR_OWN = {
    f"{_HOOKS_OF_TORCH}.mixed_precision_hooks": "`mixed_precision`",
    f"{_HOOKS_OF_TORCH}.optimizer_overlap_hooks": "an optimizer in the backward pass",
}


class DistributedDataParallel(_TorchDDP):  # type: ignore[misc]
    """torch's class, whose gradients are summed in one fixed order on every backend.

    Replaces ``torch.nn.parallel.DistributedDataParallel``: a subclass with the same arguments,
    methods and behaviour. The differences:

    * **Bits do not depend on how gradients travel.** Gradients are divided by the number of ranks W
      and summed along one binary tree (:mod:`unisono.plan.summation`), so `bucket_cap_mb`,
      `find_unused_parameters`, `static_graph`, `gradient_as_bucket_view` and the backend change no
      bit. Libraries sum in rings, where for W ≥ 3 the order depends on an element's position in its
      bucket. The backend ``unisono``, and any backend for W ≤ 2, sums in the right order by itself;
      otherwise each bucket is exchanged in two steps (``averaging.py``). The path for NCCL and
      W ≥ 3 is written but has not been run yet.
    * **A model that differs between ranks raises on all of them**, instead of on some of them.

    Your own hook (``register_comm_hook``) replaces ours and determines the order. So do
    `mixed_precision` and optimizers that run in the backward pass, which register hooks of torch's;
    a warning says so. Every rank gathers sparse gradients and adds them in the same order.

    Over a slow link, torch's hooks that send less work as on torch's own class::

        from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as power_sgd

        state = power_sgd.PowerSGDState(None, matrix_approximation_rank=4)
        ddp.register_comm_hook(state, power_sgd.powerSGD_hook)

    Collective: every rank makes one, in the same order, and every backward pass is a collective.

    Raises:
        MismatchError: the ranks' models differ.
        ValueError: torch's, and for ``optimize_ddp = "python_reducer"`` where only a hook could
            keep the order.
    """

    _in_order: InOrder | None = None  # None if the group's own sums are canonical

    @functools.wraps(_TorchDDP.__init__)  # type: ignore[misc]
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        given = inspect.signature(_TorchDDP.__init__).bind(self, *args, **kwargs).arguments
        self.__dict__["_to_be_compared"] = given.get("init_sync", True)
        # What torch broadcasts initially; `self.broadcast_buffers` is about forward passes.
        is_given = given.get("forward_sync_buffers") is not None
        self.__dict__["_shares_buffers"] = is_given or given.get("broadcast_buffers") in (
            None,
            True,
        )
        super().__init__(*args, **kwargs)

    def _build_params_for_reducer(self) -> Any:
        built = super()._build_params_for_reducer()
        if self.__dict__.pop("_to_be_compared", False):
            self._compare_models()
        return built

    def _compare_models(self) -> None:
        if not isinstance(self.process_group, dist.ProcessGroup):
            raise ValueError(
                "`process_group` must have this rank as a member, but has not: make the "
                "DistributedDataParallel on its members only."
            )
        named: list[tuple[str, torch.Tensor]] = [*self.module.named_parameters()]
        if self._shares_buffers:
            named += self.module.named_buffers()
        ignored = self.parameters_to_ignore
        lines = describe((name, tensor) for name, tensor in named if name not in ignored)
        text, group = "\n".join(lines).encode(), self.process_group
        heads = _gather(len(text).to_bytes(8, "little"), 8, group, self.device)
        sizes = [int.from_bytes(one, "little") for one in heads]
        texts = _gather(text, max(sizes), group, self.device)
        models = [one[:size].decode().split("\n") for one, size in zip(texts, sizes, strict=True)]
        # Names may differ: only the order counts.
        if any(_shapes(model) != _shapes(models[0]) for model in models):
            raise MismatchError(difference(models, dist.get_process_group_ranks(group)))

    def _ddp_init_helper(self, parameters: Any, expect_sparse_gradient: Any, *rest: Any) -> None:
        super()._ddp_init_helper(parameters, expect_sparse_gradient, *rest)
        free_group_last(self)
        self._in_order, self._is_left_to_a_hook = None, False  # the reducer is new
        self._has_sparse_gradients = any(expect_sparse_gradient)
        self._order_sums()

    def _order_sums(self) -> None:
        """Register our hook if the reducer's own sums would not have the canonical bits."""
        group = self.process_group
        if self._in_order is not None:
            self._in_order.group = group
        elif not self._is_left_to_a_hook and self._needs_hook():
            if self._use_python_reducer:
                raise ValueError(
                    '`torch._dynamo.config.optimize_ddp` must not be "python_reducer", '
                    "which divides and sums gradients in a different order from the other modes: "
                    "choose another mode."
                )
            self._in_order = InOrder(group)
            _register_comm_hook(self.reducer, self._in_order, average)

    def _needs_hook(self) -> bool:
        group = self.process_group
        if not sums_in_order(group):
            return True
        if self._has_sparse_gradients and isinstance(group, Group):
            return True  # the group has only dense collectives
        # The reducer divides gradients that are already in its buckets or are copied together, and
        # multiplies others by 1/W: different unless W is a power of two. The Python one divides.
        divides = self.gradient_as_bucket_view or getattr(self, "batched_grad_copy", False)
        return bool(divides or self._use_python_reducer) and group.size() > 2

    def register_comm_hook(self, state: object, hook: Hook) -> None:
        """Average the gradients with your own hook; see torch's documentation. Once per model."""
        what = _WITH_ORDERS_OF_THEIR_OWN.get(getattr(hook, "__module__", ""))
        if what and not sums_in_order(self.process_group):
            warnings.warn(
                f"{what} brings a hook of torch's, which sums in the library's order: bits may "
                f"depend on the sizes of buckets. The backend `unisono` has one order for all.",
                stacklevel=2,
            )
        if self._in_order is None or self._in_order.replacement is not None:
            super().register_comm_hook(state, hook)
            self._is_left_to_a_hook = True  # unless torch rejected it
            return
        self._check_comm_hook(hook)
        if self.logger is not None:
            self.logger._set_comm_hook_name(hook.__qualname__)
        self._comm_hooks.append((hook, state))
        self._in_order.replacement = hook, state
        self._is_left_to_a_hook = True

    def _register_builtin_comm_hook(self, comm_hook_type: BuiltinCommHookType) -> None:
        if self._in_order is None or self._in_order.replacement is not None:
            super()._register_builtin_comm_hook(comm_hook_type)
            self._is_left_to_a_hook = True
            return
        if self.logger is not None:
            self.logger._set_comm_hook_name(str(comm_hook_type))
        # torch would reject its C++ hook beside ours; this one does the same.
        self._in_order.replacement = _BUILTIN_HOOKS[comm_hook_type], self._in_order.group
        self._is_left_to_a_hook = True

    def _update_process_group(self, new_process_group: dist.ProcessGroup) -> None:
        super()._update_process_group(new_process_group)
        free_group_last(self)
        if self.process_group is new_process_group:
            self._order_sums()

    def _delayed_all_reduce_hook(self, grad: torch.Tensor) -> torch.Tensor:
        group = self.process_group
        mean_in_order(self._delay_grad_buffer, group, group.size())
        return grad

    def _pre_forward(self, *inputs: Any, **kwargs: Any) -> Any:
        if self._in_order is not None:
            self._in_order.divisor = self.process_group.size()
        return super()._pre_forward(*inputs, **kwargs)

    def _check_global_requires_backward_grad_sync(self, is_joined_rank: bool) -> bool | None:
        """Report to joined ranks whether this step is synchronized, and count the remaining ranks.

        Collective: with joined ranks' calls. torch's method does the same but ignores the sum.
        """
        ours = self._in_order
        if ours is None or is_joined_rank or self._divide_by_initial_world_size:
            answer: bool | None = super()._check_global_requires_backward_grad_sync(is_joined_rank)
            return answer
        num_left = torch.full((1,), float(self.require_backward_grad_sync), device=self.device)
        dist.all_reduce(num_left, group=self.process_group)
        ours.divisor = max(int(num_left.item()), 1)
        return None

    def __getstate__(self) -> dict[str, Any]:
        attributes: dict[str, Any] = super().__getstate__()
        attributes.pop("_in_order", None)  # created again with the reducer
        return attributes


def describe(named: Iterable[tuple[str, torch.Tensor]]) -> list[str]:
    """Return one line for each parameter and buffer: ``fc.bias: float32 (10,)``."""
    return [
        f"{name}: {dtype_name(tensor.dtype)} {tuple(tensor.shape)}"
        f"{'' if tensor.requires_grad else ', takes no gradient'}"
        for name, tensor in named
    ]


def difference(models: Sequence[Sequence[str]], ranks: Sequence[int]) -> str:
    """Describe where models first differ from the first rank's."""
    first = models[0]
    other = next(rank for rank, model in enumerate(models) if _shapes(model) != _shapes(first))
    theirs = models[other]
    longest = range(max(len(first), len(theirs)))
    at = next(i for i in longest if _shapes(first[i : i + 1]) != _shapes(theirs[i : i + 1]))
    return (
        f"every rank must have the same model, but number {at} of its parameters and buffers is "
        f"`{_at(first, at)}` on rank {ranks[0]} and `{_at(theirs, at)}` on rank {ranks[other]} "
        f"({len(first)} and {len(theirs)} in all): build it alike on every rank."
    )


def _shapes(lines: Sequence[str]) -> list[str]:
    return [line.partition(": ")[2] for line in lines]


def _at(lines: Sequence[str], position: int) -> str:
    return lines[position] if position < len(lines) else "nothing"


def _gather(data: bytes, size: int, group: dist.ProcessGroup, device: torch.device) -> list[bytes]:
    own = torch.frombuffer(bytearray(data.ljust(size, b"\0")), dtype=torch.uint8).to(device)
    outputs = [torch.empty_like(own) for _ in range(group.size())]
    dist.all_gather(outputs, own, group=group)
    return [bytes(output.tolist()) for output in outputs]
