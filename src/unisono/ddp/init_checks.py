"""Decisions of ``unisono.init`` that all ranks make alike, from what each has told the others.

Ranks may have chosen different seeds, different backends (they would wait for each other until the
time is up) or the same GPU.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from unisono.errors import MismatchError
from unisono.workers.rendezvous import RankPlaces
from unisono.world import SOMEBODY, World


@dataclass(frozen=True, slots=True)
class Choice:
    """What one rank has chosen."""

    backend: str  # as torch takes it
    seed: int | None  # what it was given; None where rank 0 is to draw one
    drawn: int  # what counts if this is rank 0 and no seed was given
    gpu: str = ""  # its GPU's own name, the same in every process; empty on the CPU

    @classmethod
    def made(cls, backend: str, seed: int | None, gpu: str) -> Choice:
        """Choose, with a random number as `drawn`."""
        return cls(backend, seed, int.from_bytes(os.urandom(7), "little"), gpu)


def agreed_seed(choices: Sequence[Choice]) -> int:
    """Check that the ranks' choices, in rank order, fit together; return the seed of all.

    Raises:
        MismatchError: ranks pass different seeds, or have different backends.
        ValueError: two of them have the same GPU.
    """
    first = choices[0]
    owners: dict[str, int] = {}
    for rank, choice in enumerate(choices):
        if choice.backend != first.backend:
            raise MismatchError(
                f"`backend` must be the same on every rank, but is {first.backend!r} on rank 0 and "
                f"{choice.backend!r} on rank {rank}: pass the same everywhere. (None is 'nccl' "
                f"where a process sees GPUs, else 'unisono', or 'gloo' on several hosts: look why "
                f"these two differ there.)"
            )
        if choice.seed != first.seed:
            raise MismatchError(
                f"`seed` must be the same on every rank, so that all make the same model, but is "
                f"{first.seed} on rank 0 and {choice.seed} on rank {rank}: pass the same "
                f"everywhere, and call `seed_apart()` of what `unisono.init` returns where ranks "
                f"are to differ."
            )
        if choice.gpu and owners.setdefault(choice.gpu, rank) != rank:
            raise ValueError(
                f"each worker must have a GPU of its own for the backend {choice.backend!r}, but "
                f"ranks {owners[choice.gpu]} and {rank} have the same one ({choice.gpu}): start "
                f'fewer workers, or pass `backend="unisono"`, or "gloo" on several hosts, to '
                f"compute on the CPU."
            )
    return first.drawn if first.seed is None else first.seed


def place_among(here: World, places: RankPlaces, environ: Mapping[str, str]) -> World:
    """Correct a worker's place by where the ranks are.

    By hand, and in containers with one process each, RANK and WORLD_SIZE are often all that is set;
    :func:`unisono.world` then takes all ranks for those of one host.

    Args:
        here: the place by the environment.
        places: where the ranks have found each other.
        environ: the variables; what they say of a worker's place on its host is believed.

    Returns:
        `here`, or with ranks counted per host.
    """
    if here.started_by != SOMEBODY or "LOCAL_RANK" in environ:
        return here
    return World(
        *(here.rank, here.world_size, places.local_rank, places.local_size),
        started_by=here.started_by,
    )
