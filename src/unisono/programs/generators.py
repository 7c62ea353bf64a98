"""The program's own random generators.

They are seeded whenever the default generators are, each from the same word and its path, and
restored whenever those are restored. Otherwise the values of a dataset's
`numpy.random.default_rng(0)` would depend on what this process has computed before.
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
from unisono.programs.holders import LEAVES, Holder, seeds_of
from unisono.programs.walk import Walk


class _Own(NamedTuple):
    """One generator, with functions to seed it (from 64 bits), read its state, and restore it."""

    generator: Any
    salt: int
    seed: Callable[[int], object]
    state: Callable[[], Any]
    put_back: Callable[[Any], object]


@final
class OwnGenerators:
    """The generators that some objects lead to, and all `holders`, once :meth:`search` was called.

    The roots' names are the same in every process.
    """

    def __init__(self, **roots: Any) -> None:
        self._roots = roots
        self.found: list[_Own] = []
        self.holders: list[Holder] = []
        self._account: Account | None = None  # of the last walk
        self.apart: set[int] = set()  # parameters and buffers of modules that the roots lead to

    def search(self) -> bool:
        """Search for generators; return whether they differ from those found before."""
        if self._account is not None and not self._account.changes():
            return False  # any new path to a generator would be a change
        before = [own.generator for own in self.found]
        walk = Walk(self._roots)
        leading = [each for each in walk.holders if each.kind not in LEAVES]
        self._account = Account(leading, copies=False)
        found = [_own(path, each) for path, each in walk.generators.items()]
        self.found = [own for own in found if own is not None]
        self.holders, self.apart = walk.holders, walk.of_modules
        return before != [own.generator for own in self.found]

    def made(self) -> dict[str, Any]:
        """Return, by path, the generators that exist now, but did not at the last look."""
        if self._account is None or not self._account.changes():
            return {}
        known = {id(own.generator) for own in self.found}
        return {p: one for p, one in Walk(self._roots).generators.items() if id(one) not in known}

    def seed(self, word: int) -> None:
        """Seed all generators, each differently, from the 64 bits that the default ones get."""
        for own in self.found:
            own.seed(word ^ own.salt)

    def states(self) -> list[Any]:
        """Return the states of all generators."""
        return [own.state() for own in self.found]

    def set_states(self, states: Sequence[Any]) -> None:
        """Set each generator to a state, if there are as many states."""
        if len(states) == len(self.found):
            for own, state in zip(self.found, states, strict=True):
                own.put_back(state)

    @contextmanager
    def put_back(self) -> Iterator[None]:
        """Restore the generators known now after the block, even on errors."""
        states = [(own, own.state()) for own in self.found]
        try:
            yield
        finally:
            for own, state in states:
                own.put_back(state)


def _own(path: str, generator: Any) -> _Own | None:
    """Return a generator with its functions; None if it cannot be seeded."""
    salt = int.from_bytes(hashlib.blake2b(path.encode(), digest_size=8).digest(), "little")
    # Runs no code of the program: a subclass's `seed` is not called.
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

    def put_back(state: tuple[Any, Any]) -> None:
        bits.state, seeds = state
        if seeds is not None:
            seeds_of(bits).__setstate__(seeds)

    def state_of(bits: Any) -> tuple[Any, Any]:
        # `__reduce__` of numpy's seeds: how to make them, from what, and their state.
        return bits.state, None if seeds_of(bits) is None else seeds_of(bits).__reduce__()[2]

    return _Own(
        generator,
        salt,
        lambda word: put_back(state_of(type(bits)(word))),
        lambda: state_of(bits),
        put_back,
    )


def copy_of(generator: Any) -> Any:
    """Return a copy of a generator with the same state; None if it cannot be copied."""
    with suppress(Exception):
        return copy.deepcopy(generator)
    return None


def set_state(generator: Any, other: Any) -> None:
    """Set a generator to the state of another one of its class."""
    ours, theirs = _own("", generator), _own("", other)
    if ours is not None and theirs is not None:
        ours.put_back(theirs.state())
