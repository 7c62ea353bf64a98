"""Generators of the program's own, seeded as the default ones are.

A data set has its `numpy.random.default_rng(0)`, a loss its `torch.Generator()`. What they give
would depend on what this process has computed before. So those that can be found (``reach.py``) are
seeded wherever the default ones are, each from the same word and its own name, and are put back
where the default ones are put back.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch

from unisono.reach import Holder, reach


class _Own(NamedTuple):
    """One generator: how it is seeded (from 64 bits), read, and put back."""

    generator: Any
    salt: int
    seed: Callable[[int], object]
    state: Callable[[], Any]
    put_back: Callable[[Any], object]


class OwnGenerators:
    """Those that some objects lead to, once :meth:`look` was called. Final.

    Args:
        roots: where to look, by names that are the same in every process.

    Attributes:
        found: those, as they were found last.
        holders: what else was found then, see :func:`reach`.
    """

    def __init__(self, **roots: Any) -> None:
        self._roots = roots
        self.found: list[_Own] = []
        self.holders: list[Holder] = []

    def look(self) -> bool:
        """Look, maybe again; tell whether others are there than before."""
        before = [own.generator for own in self.found]
        reached = reach(self._roots)
        found = [_own(path, each) for path, each in reached.generators.items()]
        self.found = [own for own in found if own is not None]
        self.holders = reached.holders
        return before != [own.generator for own in self.found]

    def seed(self, word: int) -> None:
        """Seed all of them, each otherwise, from the 64 bits that the default ones get."""
        for own in self.found:
            own.seed(word ^ own.salt)

    def states(self) -> list[Any]:
        """Give what each of them stands at."""
        return [own.state() for own in self.found]

    @contextmanager
    def put_back(self) -> Iterator[None]:
        """Leave those that are known now as they were, whatever happens."""
        states = [(own, own.state()) for own in self.found]
        try:
            yield
        finally:
            for own, state in states:
                own.put_back(state)


def _own(path: str, generator: Any) -> _Own | None:
    """Say how a generator is seeded; None if that cannot be done."""
    salt = int.from_bytes(hashlib.blake2b(path.encode(), digest_size=8).digest(), "little")
    # No code of the program's: what its own classes make of `seed` is not asked.
    if isinstance(generator, random.Random):
        seeded, stated, put = random.Random.seed, random.Random.getstate, random.Random.setstate
        return _Own(
            generator,
            salt,
            lambda word: seeded(generator, word),
            lambda: stated(generator),
            lambda state: put(generator, state),
        )
    if isinstance(generator, torch.Generator):
        return _Own(
            generator, salt, generator.manual_seed, generator.get_state, generator.set_state
        )
    if isinstance(generator, np.random.RandomState):
        return _Own(
            generator,
            salt,
            lambda word: generator.seed(word % 2**32),
            lambda: generator.get_state(legacy=False),
            generator.set_state,
        )
    bits: Any = getattr(generator, "bit_generator", generator)
    if type(bits).__module__.partition(".")[0] != "numpy":
        return None

    def seed(word: int) -> None:
        bits.state = type(bits)(word).state

    return _Own(
        generator, salt, seed, lambda: bits.state, lambda state: setattr(bits, "state", state)
    )
