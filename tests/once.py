"""For programs of tests that count passes: each shard is computed once, as nothing is compared."""

from contextlib import contextmanager

from unisono.training.computed_twice import ComputedTwice


@contextmanager
def computed_once():
    before = ComputedTwice.is_exact
    ComputedTwice.is_exact = False
    try:
        yield
    finally:
        ComputedTwice.is_exact = before
