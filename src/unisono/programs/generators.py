"""Generators of random numbers of the program's own.

They are seeded wherever the default ones are, each from the same word and its own path, and put
back where these are put back: what a data set's `numpy.random.default_rng(0)` returns would depend
on what this process has computed before.
"""

from __future__ import annotations

import copy
import functools
import hashlib
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple, final

import numpy as np
import torch

from unisono.programs.account import Account
from unisono.programs.holders import LEAVES, Holder
from unisono.programs.walk import Walk


class _Own(NamedTuple):
    """One generator: how it is seeded (from 64 bits), read, and put back."""

    generator: Any
    salt: int
    seed: Callable[[int], object]
    state: Callable[[], Any]
    put_back: Callable[[Any], object]


@final
class OwnGenerators:
    """Those that some objects lead to, and all `holders`, once :meth:`look` was called.

    The roots' names are the same in every process.
    """

    def __init__(self, **roots: Any) -> None:
        self._roots = roots
        self.found: list[_Own] = []
        self.holders: list[Holder] = []
        self._account: Account | None = None  # of the last walk
        self.apart: set[int] = set()  # parameters and buffers of modules that they lead to

    def look(self) -> bool:
        """Look, maybe again; return whether others are there than before."""
        if self._account is not None and not self._account.changes():
            return False  # whatever leads elsewhere now would have changed
        before = [own.generator for own in self.found]
        walk = Walk(self._roots)
        leading = [each for each in walk.holders if each.kind not in LEAVES]
        self._account = Account(leading, copies=False)
        found = [_own(path, each) for path, each in walk.generators.items()]
        self.found = [own for own in found if own is not None]
        self.holders, self.apart = walk.holders, walk.of_modules
        return before != [own.generator for own in self.found]

    def seed(self, word: int) -> None:
        """Seed all of them, each otherwise, from the 64 bits that the default ones get."""
        for own in self.found:
            own.seed(word ^ own.salt)

    def states(self) -> list[Any]:
        """Return how far each of them has come."""
        return [own.state() for own in self.found]

    def set_states(self, states: Sequence[Any]) -> None:
        """Have each of them continue from a state, where as many are there."""
        if len(states) == len(self.found):
            for own, state in zip(self.found, states, strict=True):
                own.put_back(state)

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
    """Return how a generator is seeded; None if that cannot be done."""
    salt = int.from_bytes(hashlib.blake2b(path.encode(), digest_size=8).digest(), "little")
    # No code of the program's: what its own classes make of `seed` is not asked.
    if isinstance(generator, random.Random):
        kind = random.Random
        calls: Any = (kind.seed, kind.getstate, kind.setstate)
        return _Own(generator, salt, *(functools.partial(call, generator) for call in calls))
    if isinstance(generator, torch.Generator):
        of_torch = generator.manual_seed, generator.get_state, generator.set_state
        return _Own(generator, salt, *of_torch)
    if isinstance(generator, np.random.RandomState):
        state = functools.partial(generator.get_state, legacy=False)
        return _Own(
            generator, salt, lambda word: generator.seed(word % 2**32), state, generator.set_state
        )
    bits: Any = getattr(generator, "bit_generator", generator)
    if type(bits).__module__.partition(".")[0] != "numpy":
        return None

    def seed(word: int) -> None:
        bits.state = type(bits)(word).state

    return _Own(
        generator, salt, seed, lambda: bits.state, lambda state: setattr(bits, "state", state)
    )


def copy_of(generator: Any) -> Any:
    """Return a generator that has come as far; None if that cannot be done."""
    with suppress(Exception):
        return copy.deepcopy(generator)
    return None


def set_state(generator: Any, other: Any) -> None:
    """Have a generator continue as another one of its class would."""
    ours, theirs = _own("", generator), _own("", other)
    if ours is not None and theirs is not None:
        ours.put_back(theirs.state())
