"""Run code as another rank would, to find out what depends on the rank."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, final

from unisono.runtime.workers.context import context
from unisono.runtime.world import World

_NAMES = "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"
_ENCODED: frozenset[Any] = frozenset(map(os.environ.encodekey, _NAMES))


@final
class RankReads(dict[bytes, bytes]):
    """The variables of `os.environ`, which record whether code asks for its rank.

    The process's own environment is unchanged.
    """

    def __init__(self) -> None:
        self.are_any = False
        self._replaced = os.environ._data  # type: ignore[attr-defined]
        super().__init__(self._replaced)
        os.environ._data = self  # type: ignore[attr-defined]

    def __getitem__(self, name: bytes) -> bytes:
        self.are_any |= name in _ENCODED
        return super().__getitem__(name)

    def end(self) -> None:
        """Stop recording; variables that were set meanwhile stay set."""
        if os.environ._data is self:  # type: ignore[attr-defined]
            self._replaced.clear()
            self._replaced.update(self)
            os.environ._data = self._replaced  # type: ignore[attr-defined]


@contextmanager
def as_another_worker(world: World) -> Iterator[None]:
    """Make `os.environ` describe another worker, of a world larger by one, within a block.

    The process's own environment is unchanged: a library's thread may read it during the block.
    """
    numbers = (world.rank, world.local_rank, world.world_size, world.local_world_size)
    of_python = os.environ._data  # type: ignore[attr-defined]
    before = dict(of_python)
    context().held = world  # nobody may join the others under another number
    try:
        for name, number in zip(_NAMES, numbers, strict=True):
            of_python[os.environ.encodekey(name)] = os.environ.encodevalue(str(number + 1))
        yield
    finally:
        context().held = None
        for name in _ENCODED:
            of_python.pop(name, None)
            if name in before:
                of_python[name] = before[name]
