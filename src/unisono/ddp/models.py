"""Checks that all ranks have the same model, before its first exchange.

torch compares with rank 0's model and raises on the ranks that differ, while rank 0 waits. Here
all ranks compare fingerprints, and descriptions only if those differ, so all raise.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist

from unisono.dtypes import dtype_name
from unisono.errors import MismatchError

_FINGERPRINT_BYTES = 32
_SIZE_BYTES = 8
_NOTHING = "nothing"


def describe(named: Iterable[tuple[str, torch.Tensor]]) -> list[str]:
    """Describe each parameter and buffer in a line: ``fc.bias: float32 (10,)``."""
    lines = []
    for name, tensor in named:
        dtype = dtype_name(tensor.dtype)
        frozen = "" if tensor.requires_grad else ", takes no gradient"
        lines.append(f"{name}: {dtype} {tuple(tensor.shape)}{frozen}")
    return lines


def check_equal(lines: Sequence[str], group: dist.ProcessGroup, device: torch.device) -> None:
    """Compare the lines of :func:`describe`. Collective: every rank of the group calls it.

    Names may differ, as only the order counts.

    Raises:
        MismatchError: on every rank, if two models differ.
    """
    text = "\n".join(lines).encode()
    # Names are for the message only.
    shapes = "\n".join(_shapes(lines)).encode()
    head = hashlib.sha256(shapes).digest() + len(text).to_bytes(_SIZE_BYTES, "little")
    heads = _gather(head, len(head), group, device)
    if len({one[:_FINGERPRINT_BYTES] for one in heads}) == 1:
        return
    sizes = [int.from_bytes(one[_FINGERPRINT_BYTES:], "little") for one in heads]
    texts = _gather(text, max(sizes), group, device)
    models = [one[:size].decode().split("\n") for one, size in zip(texts, sizes, strict=True)]
    raise MismatchError(difference(models, dist.get_process_group_ranks(group)))


def difference(models: Sequence[Sequence[str]], ranks: Sequence[int]) -> str:
    """Describe where models first differ from the first rank's.

    Args:
        models: the description of each rank's, not all equal.
        ranks: the global ranks.
    """
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
    return lines[position] if position < len(lines) else _NOTHING


def _gather(data: bytes, size: int, group: dist.ProcessGroup, device: torch.device) -> list[bytes]:
    own = torch.frombuffer(bytearray(data.ljust(size, b"\0")), dtype=torch.uint8).to(device)
    outputs = [torch.empty_like(own) for _ in range(group.size())]
    dist.all_gather(outputs, own, group=group)
    return [bytes(output.tolist()) for output in outputs]
