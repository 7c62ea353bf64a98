"""What does a stage of a model wait for, in words that the launcher can read?"""

from __future__ import annotations

import re

_FROM = re.compile(rb"^the (?:activations|gradients) of stage \d+ for shard \d+ from rank (\d+)$")


def stage_wait_in_words(what: str, stage: int, shard: int, rank: int) -> str:
    """Say what for.

    Args:
        what: ``"activations"`` or ``"gradients"``.
        stage: which computes them.
        shard: of which.
        rank: the worker of that stage.
    """
    return f"the {what} of stage {stage} for shard {shard} from rank {rank}"


def awaited_rank(wait: bytes | None) -> int | None:
    """Tell for which rank a stage waits, if a wait that was shown is a stage's."""
    found = None if wait is None else _FROM.match(wait)
    return None if found is None else int(found[1])
