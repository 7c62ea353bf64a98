"""Who am I among how many? A frozen value, built by hand or found in the environment.

The words are torch's: ``rank`` counts all workers, ``local_rank`` those of this host.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

DEFAULT_DEVICES_AT_MOST = 8


@dataclass(frozen=True, slots=True)
class World:
    """The place of one worker among all of them.

    Attributes:
        rank: 0 … world_size − 1.
        world_size: the number of workers.
        local_rank: 0 … local_world_size − 1 on this host.
        local_world_size: the number of workers on this host.
    """

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1

    def __post_init__(self) -> None:
        for name, position, count in (
            ("rank", self.rank, self.world_size),
            ("local_rank", self.local_rank, self.local_world_size),
        ):
            if not 0 <= position < count:
                raise ValueError(
                    f"`{name}` must be at least 0 and below the number of workers, "
                    f"but is {position} of {count}: check the launcher's environment variables."
                )


def world(environ: Mapping[str, str] | None = None) -> World:
    """Find this worker's place in the environment; alone, it is rank 0 of 1.

    Args:
        environ: the variables to read; the process's own by default.

    Raises:
        ValueError: a variable is not a number, or a rank does not fit its size.
    """
    environ = os.environ if environ is None else environ
    if "RANK" not in environ or "WORLD_SIZE" not in environ:
        return World()
    rank = _number(environ, "RANK")
    world_size = _number(environ, "WORLD_SIZE")
    return World(
        rank=rank,
        world_size=world_size,
        local_rank=_number(environ, "LOCAL_RANK", rank),
        local_world_size=_number(environ, "LOCAL_WORLD_SIZE", world_size),
    )


def num_devices() -> int:
    """Count the devices that workers and shards default to: usable cores, at most 8."""
    return min(len(os.sched_getaffinity(0)), DEFAULT_DEVICES_AT_MOST)


def threads_per_worker(environ: Mapping[str, str] | None = None) -> int:
    """Read how many threads each worker computes with: ``UNISONO_THREADS``, else 1.

    The number changes the bits of a result, so it is never derived from the number of workers.
    """
    environ = os.environ if environ is None else environ
    threads = _number(environ, "UNISONO_THREADS", 1)
    if threads < 1:
        raise ValueError(f"`UNISONO_THREADS` must be at least 1, but is {threads}: set it to 1.")
    return threads


def _number(environ: Mapping[str, str], name: str, default: int | None = None) -> int:
    text = environ.get(name)
    if text is None and default is not None:
        return default
    try:
        return int(text or "")
    except ValueError:
        raise ValueError(f"`{name}` must be a whole number, but is {text!r}: unset it.") from None
