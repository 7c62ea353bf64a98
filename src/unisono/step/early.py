"""Gradients of a worker's last part go to the exchange while its last backward pass goes on.

Only where the exchange has a use for them: bytes travel while the rest is still computed. Hooks are
set before that pass and removed after it, so they come behind all hooks of the program.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch

from unisono.exchange.protocol import Exchange
from unisono.step.gradients import GradientStack


@contextmanager
def published_early(
    parameters: Sequence[torch.nn.Parameter],
    stack: GradientStack,
    exchange: Exchange,
    others: Sequence[torch.nn.Parameter] = (),
) -> Iterator[None]:
    """Publish each gradient that the backward pass in the block leaves, summed over the last part.

    Args:
        parameters: those that the optimizers update.
        stack: has the shards before this one, which is the last.
        exchange: takes gradients early.
        others: those of `parameters` that stay as they are in this update.
    """

    def publish(index: int, parameter: torch.Tensor) -> None:
        if parameter.grad is not None:
            part, total = stack.add_early(index, parameter.grad)
            exchange.publish_early(part, index, total)

    unwanted = set(map(id, others))
    hooks = [
        parameter.register_post_accumulate_grad_hook(partial(publish, index))  # type: ignore[no-untyped-call]
        for index, parameter in enumerate(parameters)
        if parameter.requires_grad and id(parameter) not in unwanted
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
