"""Random numbers that depend on what is computed, never on who computes it."""

from __future__ import annotations

import hashlib
import struct


def seed_of(stream: str, seed: int, *place: int) -> int:
    """Derive the seed of one place in a run.

    Args:
        stream: what the numbers are for (``"train"``, ``"evaluate"``); streams never meet.
        seed: the run's seed; any whole number.
        place: where, such as (step, shard); any non-negative whole numbers below 2⁶³.

    Returns:
        64 bits, evenly spread (BLAKE2b of all arguments).
    """
    key = struct.pack(f"<q{len(place)}q", seed % 2**63, *place)
    return int.from_bytes(
        hashlib.blake2b(key, digest_size=8, person=stream.encode()).digest(), "little"
    )
