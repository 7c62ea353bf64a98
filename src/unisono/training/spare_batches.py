"""Copies of batches, from which passes are computed again, and hashes of what they return."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map

from unisono.programs.hashes import hashed
from unisono.programs.rehearsal import Seen

_WHOLE = 32 << 20  # bytes of a tensor; larger tensors are sampled


def spare_copy(batch: Any) -> Any:
    """Copy a batch, with the memory layouts of its tensors; None if it cannot be copied."""
    with suppress(Exception):
        return tree_map(_copied, batch)
    return None


def hash_of(value: Any) -> str:
    """Hash a batch or a tensor; of large tensors a sample."""
    return hashed(value, _WHOLE)


def hashes_of_leaves(returned: Any) -> Seen:
    """Hash the tensors that a function returned."""
    tree = dict(returned) if isinstance(returned, Mapping) else returned
    leaves = [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]
    return {f"result {at}": hash_of(leaf) for at, leaf in enumerate(leaves)}


def _copied(leaf: Any) -> Any:
    """Copy a leaf of a batch, with its memory layout and without its graph."""
    if not isinstance(leaf, torch.Tensor):
        return copy.deepcopy(leaf)
    spanned = 1 + sum((n - 1) * by for n, by in zip(leaf.shape, leaf.stride(), strict=True))
    if not leaf.numel() or spanned > 4 * leaf.numel():
        return leaf.detach().clone()
    flat = leaf.detach().as_strided((spanned,), (1,)).clone()
    return flat.as_strided(leaf.shape, leaf.stride())
