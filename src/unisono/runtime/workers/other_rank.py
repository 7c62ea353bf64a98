"""Run code as another rank would, to find out what depends on the rank."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

from unisono.runtime.workers.context import context
from unisono.runtime.world import World


@contextmanager
def as_another_worker(world: World) -> Iterator[None]:
    """Make `os.environ` describe another worker, of a world larger by one, within a block.

    The process's own environment is unchanged: a library's thread may read it during the block.
    """
    names = "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"
    numbers = (world.rank, world.local_rank, world.world_size, world.local_world_size)
    of_python = os.environ._data  # type: ignore[attr-defined]
    before = dict(of_python)
    context().held = world  # nobody may join the others under another number
    try:
        for name, number in zip(names, numbers, strict=True):
            of_python[os.environ.encodekey(name)] = os.environ.encodevalue(str(number + 1))
        yield
    finally:
        context().held = None
        for name in map(os.environ.encodekey, names):
            of_python.pop(name, None)
            if name in before:
                of_python[name] = before[name]
