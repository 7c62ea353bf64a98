"""Random numbers that depend on what is computed, never on who computes it.

torch's CPU generator takes the low 32 bits of a seed and drops the others. Hashes of 32 bits soon
collide: among 77,000 samples, two would draw the same numbers with probability 1/2. So the places
of a stream are counted, and the low 32 bits of a seed are a permutation of the count.
"""

from __future__ import annotations

import functools
import hashlib
import struct

_LOW = 2**32 - 1


def seed_of(stream: str, seed: int, number: int = 0, repeat: int = 0) -> int:
    """Return the seed of one place in a run: 64 bits, evenly distributed.

    Args:
        stream: what the numbers are for (``"train"``, ``"evaluate"``), at most 16 bytes.
        seed: the run's seed; any integer.
        number: which place of the stream, such as step · S + shard; not negative. 2³² consecutive
            places have different seeds, which differ in the low 32 bits as well.
        repeat: how often the place came before, for a sample that is taken several times.
    """
    word = _word_of(stream, seed, repeat, number >> 32)
    return (word & ~_LOW) | _permuted((word ^ number) & _LOW)


@functools.lru_cache(maxsize=256)
def _word_of(stream: str, seed: int, repeat: int, era: int) -> int:
    key = struct.pack("<3q", seed % 2**63, repeat, era)
    return int.from_bytes(
        hashlib.blake2b(key, digest_size=8, person=stream.encode()).digest(), "little"
    )


def _permuted(word: int) -> int:
    """Permute the integers below 2³², so that neighbours look unrelated.

    Source: the finalizer of Austin Appleby's MurmurHash3 (32 bits).
    """
    word ^= word >> 16
    word = word * 0x85EBCA6B & _LOW
    word ^= word >> 13
    word = word * 0xC2B2AE35 & _LOW
    return word ^ word >> 16
