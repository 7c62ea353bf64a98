"""Hidden state from batch to batch: losses and forward functions of (model, batch, state).

::

    loss(model, batch, state) → (loss, state)      state: None at the start of an epoch, then what
                                                   was returned for the shard's batch before

Shard v of a batch has the rows that shard v of the batch before had, so the order of samples has to
be one in which each row of a batch continues that row of the batch before.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from unisono.exchange.carried_states import CarriedStates
from unisono.plan.samples import SamplePlan
from unisono.train.default_forward import WITH_STATE


def carrying(compute: Callable[..., Any], states: CarriedStates) -> Callable[[nn.Module, Any], Any]:
    """Have a function of (model, batch, state) that returns (result, state) keep its states.

    Raises:
        TypeError: it returns something else.
    """
    compute = WITH_STATE.get(compute, compute)

    @functools.wraps(compute)
    def carry(model: nn.Module, batch: Any) -> Any:
        returned = compute(model, batch, states.value)
        if not isinstance(returned, tuple) or len(returned) != 2 or _is_number(returned[1]):
            seen = type(returned).__name__
            if isinstance(returned, tuple):
                seen = f"({', '.join(type(part).__name__ for part in returned)})"
            raise TypeError(
                f"with `carry=True`, a loss must return a pair (loss, state), and a forward "
                f"function (outputs, state), but returned {seen}: return the state beside it, as "
                f"in `return loss, state`, or `return (sum, weight), state`."
            )
        found, states.value = returned
        return found

    return carry


def check_rows(samples: SamplePlan) -> None:
    """Refuse a plan in which a row of a batch is not that row of the batch before.

    Raises:
        ValueError: samples are shuffled, or batches do not have the same rows.
    """
    batch_size, shards, num_samples = samples.batch_size, samples.shards, samples.num_samples
    if samples.shuffle:
        raise ValueError(
            "`shuffle` must be False with `carry=True`, as each row of a batch goes on where that "
            "row of the batch before has ended, but samples are shuffled: pass `shuffle=False` "
            "and a dataset in that order (`unisono.data.continuing_rows`), or a `sampler`."
        )
    if batch_size % shards:
        raise ValueError(
            f"`batch_size` must be a multiple of `shards` ({shards}) with `carry=True`, so that a "
            f"shard has the same rows of every batch, but is {batch_size}: pass "
            f"`batch_size={batch_size // shards * shards}`."
        )
    if num_samples % batch_size and not samples.is_endless:
        raise ValueError(
            f"with `carry=True` all batches must have the same rows, so the number of samples must "
            f"be a multiple of `batch_size` ({batch_size}), but is {num_samples}: leave out "
            f"{num_samples % batch_size}, as `unisono.data.continuing_rows` does."
        )


def _is_number(state: Any) -> bool:
    """Tell whether a state looks like the weight of a sum, beside which it was forgotten."""
    return isinstance(state, (int, float)) or (isinstance(state, torch.Tensor) and not state.ndim)
