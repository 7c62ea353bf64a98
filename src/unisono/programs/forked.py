"""Has anything changed since a process was forked, of what its forks have a copy of?

Loader processes read the dataset as it was when they were forked. Once the program changes objects
that samples are read from, new ones are forked, so that their number has no effect.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from contextlib import suppress
from typing import Any, final

import torch

from unisono.programs import holders as h
from unisono.programs.hashes import hashed
from unisono.programs.holders import Content, Holder
from unisono.programs.walk import Walk

_SAMPLED = 4096  # of a tensor or an array, in bytes
_UNSEEN = (h.CACHE, h.DRAWN, h.POSITION, h.SUSPENDED, h.FROZEN, h.MADE_IN_C)


@final
class ForkedCopy:
    """The state of some objects when a process was forked.

    Args:
        roots: the objects, by name.
        of_run: identities of tensors that training changes in every step.

    Attributes:
        leads_to_run: the path to such a tensor; empty if there is none.
    """

    def __init__(self, roots: Mapping[str, Any], of_run: Collection[int]) -> None:
        walk = Walk(roots)
        paths = (walk.paths[each] for each in of_run if each in walk.paths)
        self.leads_to_run = min(paths, key=len, default="")
        self._then: list[tuple[Holder, Content]] = []
        for holder in walk.holders:
            with suppress(Exception):
                if holder.kind not in _UNSEEN:
                    self._then.append((holder, _read(holder)))

    def changed(self) -> str:
        """Return the path to a changed value; empty if nothing has changed."""
        for holder, then in self._then:
            with suppress(Exception):
                now = _read(holder)
                if not h.same(then, now):
                    return holder.shown(next(iter(h.changed_slots(then, now)), ""))
        return ""


def _read(holder: Holder) -> Content:
    if holder.kind is not h.CONTENTS:
        return holder.read()
    version = holder.owner._version if isinstance(holder.owner, torch.Tensor) else 0
    return (), (version, hashed(holder.owner, _SAMPLED))
