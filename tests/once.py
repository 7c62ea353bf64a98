"""For programs of tests that count passes: each shard is computed once, as nothing is compared."""

from contextlib import contextmanager

from unisono.training.rehearsals import Rehearsals


@contextmanager
def computed_once():
    before = Rehearsals.is_exact
    Rehearsals.is_exact = False
    try:
        yield
    finally:
        Rehearsals.is_exact = before
