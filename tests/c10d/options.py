"""torch's options of a collective call, as its Python functions make them."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist


def options(
    kind: Any, root: int = 0, op: Any = dist.ReduceOp.SUM, *, is_async: bool = False
) -> Any:
    made = kind()
    made.asyncOp = is_async
    if hasattr(made, "rootRank"):
        made.rootRank = root
    if hasattr(made, "reduceOp"):
        made.reduceOp = op
    return made
