"""What the code of a program names and makes, as far as it can be seen without running it."""

import pytest

from unisono.programs.live import orders_by_hash


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("ids = {word: n for n, word in enumerate(set(words))}", True),
        ("def f(words):\n    return lambda: {w for w in words}", True),
        ("names = {first, second}", True),
        ("class A:\n    def seed(self):\n        return hash(self.name)", True),
        ("if name in {'a', 'b'}:\n    pass", False),
        ("kept = [n for n in range(9)]", False),
    ],
)
def test_code_that_makes_sets_or_asks_for_hashes_is_seen(source, expected):
    assert orders_by_hash(compile(source, "", "exec")) is expected
