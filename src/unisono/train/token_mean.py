"""The loss of a language model, averaged over the tokens of the global batch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.nn import functional


def token_mean(
    model: nn.Module, batch: Any, *, shift: bool = True, ignore_index: int = -100
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sum a language model's cross-entropy over tokens, and count them; pass it as `loss`.

    The model is called as ``model(**batch)``. Means are over all tokens of the global batch that
    are not ignored, in training as in ``evaluate``, however they are divided among samples, shards
    and workers. A mean of the shards' means, which the model's own ``.loss`` would give, is another
    number. For models of transformers, and others that are called so and return ``logits``.

    Args:
        model: its output has ``.logits``, or ``["logits"]``, of shape (samples, tokens, classes).
        batch: a dict of tensors with ``"labels"`` of shape (samples, tokens).
        shift: whether the logits at a token are for the next one's label, as those of causal models
            are; False for masked and for encoder-decoder models:
            ``functools.partial(unisono.token_mean, shift=False)``.
        ignore_index: the label of tokens that do not count.

    Returns:
        The sum, and how many tokens it is over.

    Raises:
        TypeError: the batch is no such dict, or the output has no logits.
        ValueError: labels do not fit the logits.
    """
    if not isinstance(batch, Mapping) or "labels" not in batch:
        has = f"has {list(batch)}" if isinstance(batch, Mapping) else f"is a {type(batch).__name__}"
        raise TypeError(
            f'`token_mean` must be given batches that are dicts with "labels", but this one {has}: '
            f'let the dataset or `collate_fn` give them, for a causal model `"labels"` as a copy '
            f'of `"input_ids"` with {ignore_index} where it is padded.'
        )
    output, labels = model(**batch), batch["labels"]
    is_mapping = isinstance(output, Mapping)
    logits = output.get("logits") if is_mapping else getattr(output, "logits", None)
    if not isinstance(logits, torch.Tensor):
        raise TypeError(
            f"`token_mean` must find `logits` in the model's output, but that is of type "
            f"{type(output).__name__}: have the model return a dict, or write the loss as a "
            f"function of (model, batch) that returns (sum, number of tokens)."
        )
    if logits.shape[:-1] != labels.shape:
        raise ValueError(
            f"labels must have the shape of the logits without their last dimension "
            f"{tuple(logits.shape[:-1])}, but have {tuple(labels.shape)}."
        )
    if shift:
        logits, labels = logits[..., :-1, :], labels[..., 1:]
    total = functional.cross_entropy(
        logits.flatten(0, -2).float(),
        labels.flatten(),
        ignore_index=ignore_index,
        reduction="sum",
    )
    return total, (labels != ignore_index).sum()
