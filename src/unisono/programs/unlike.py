"""Plain values that differ between workers, such as those computed from the rank.

Most are harmless: times, names of devices, a rank that decides who prints. To find out whether a
pass depends on one, it is computed again with another worker's value.
"""

from __future__ import annotations

import itertools
import json
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple

import numpy as np
import torch

from unisono.errors import MismatchError
from unisono.programs import holders as h
from unisono.programs.account import fill
from unisono.programs.holders import Holder
from unisono.runtime.workers.team import Team

_MANY = 4096  # places of a program, the nearest first
_LONG = 1024  # values of a place
_FEW = 16  # elements of a tensor or an array
_PLAIN = {type(None), bool, int, float, str}


class Unlike(NamedTuple):
    """A value of this worker that differs on another worker."""

    holder: Holder
    slot: Any
    here: Any
    there: Any

    @property
    def path(self) -> str:
        """The path to the value."""
        return self.holder.path if self.slot is None else self.holder.shown(self.slot)

    def now(self) -> Any:
        """Return the present value; None if there is none."""
        with suppress(Exception):
            if self.slot is None:
                return self.holder.owner.tolist()
            return dict(h.numbered(self.holder.read())).get(self.slot)
        return None

    def put(self, value: Any) -> None:
        """Set the value, unless the place has changed its kind."""
        with suppress(Exception):
            if self.slot is None:
                fill(self.holder.owner, _like(self.holder.owner, value))
                return
            names, values = self.holder.read()
            now = dict(h.numbered((names, values)))
            now[self.slot] = value
            self.holder.put((names, tuple(now.values())))


def values_unlike(team: Team, places: Callable[[], Iterable[Holder]]) -> list[Unlike]:
    """Return the values in some places that differ on the next worker. Collective."""
    if team.size == 1:
        return []
    mine = dict(_values(places()))
    numbers = {key: _number_of(value) for key, (_, _, value) in mine.items()}
    text = json.dumps(numbers).encode()
    if len({*team.gather(b"%d" % zlib.crc32(text), "values of the program").values()}) == 1:
        return []
    found = [json.loads(each) for each in team.gather(text, "values that differ").values()]
    differ = {key for key in numbers if len({each.get(key) for each in found}) > 1}
    texts = team.gather(
        json.dumps({key: mine[key][2] for key in differ}).encode(), "what differs in them"
    )
    others = [rank for rank in texts if rank > team.world.rank] or [*texts]
    theirs = json.loads(texts[others[0]])
    return [
        Unlike(holder, slot, value, theirs[key])
        for key, (holder, slot, value) in mine.items()
        if key in theirs and _number_of(theirs[key]) != numbers[key]
    ]


def depends_on_unlike(value: Unlike, differs: str) -> MismatchError:
    """Return an error for a result that depends on such a value."""
    return MismatchError(
        f"`{value.path}` differs between workers ({value.here!r:.40} here, {value.there!r:.40} on "
        f"another), and {differs} depends on it: compute the same value on every worker; a loss "
        f"needs no weight for the number of workers, as gradients are means over the whole batch."
    )


@contextmanager
def as_there(values: Sequence[Unlike]) -> Iterator[None]:
    """Set the other worker's values within a block, unless they have changed here since."""
    values = [each for each in values if _number_of(each.now()) == _number_of(each.here)]
    for each in values:
        each.put(each.there)
    try:
        yield
    finally:
        for each in values:
            each.put(each.here)


def _values(holders: Iterable[Holder]) -> Iterator[tuple[str, tuple[Holder, Any, Any]]]:
    """Yield plain values, small tensors and small arrays, each with a key for its place."""
    own = (holder for holder in holders if not holder.is_of_library)
    for holder in itertools.islice(own, _MANY):
        with suppress(Exception):
            if holder.kind is h.CONTENTS:
                if _size(holder.owner) <= _FEW:
                    yield holder.key, (holder, None, holder.owner.tolist())
                continue
            content = holder.read()
            for slot, value in h.numbered(content) if len(content[1]) <= _LONG else ():
                if type(value) in _PLAIN and type(slot) in (str, int):
                    yield f"{holder.key}\0{slot}", (holder, slot, value)


def _number_of(value: Any) -> int:
    return zlib.crc32(repr(value).encode(errors="replace"))


def _size(owner: Any) -> int:
    return int(owner.numel() if isinstance(owner, torch.Tensor) else owner.size)


def _like(owner: Any, value: Any) -> Any:
    """Make a tensor or an array of a list, for a place of that kind."""
    if isinstance(owner, torch.Tensor):
        return torch.tensor(value, dtype=owner.dtype, device=owner.device)
    return np.array(value, dtype=owner.dtype)
