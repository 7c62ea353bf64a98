"""Which ranks are on one host? The ranks tell each other, where nobody else has said it.

By hand, and in containers with one process each, RANK and WORLD_SIZE are often all that is set;
:func:`unisono.world` then takes all ranks for those of one host.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from unisono.world import SOMEBODY, World


def place_among(here: World, networks: Sequence[str], environ: Mapping[str, str]) -> World:
    """Correct a worker's place by where the ranks are.

    Args:
        here: the place by the environment.
        networks: what each rank is reached through, in rank order: equal on one host.
        environ: the variables; what they say of a worker's place on its host is believed.

    Returns:
        `here`, or with ranks counted per host.
    """
    is_said = here.started_by != SOMEBODY or "LOCAL_RANK" in environ
    if is_said or is_one_host(networks):
        return here
    near = [rank for rank, network in enumerate(networks) if network == networks[here.rank]]
    return World(
        here.rank, here.world_size, near.index(here.rank), len(near), started_by=here.started_by
    )


def is_one_host(networks: Sequence[str]) -> bool:
    """Tell whether all ranks reach each other over the loopback."""
    return len(set(networks)) == 1
