"""A transfer is given up where it stays slow or grows too large, and never else."""

from __future__ import annotations

import itertools

import pytest

from unisono.data.download import SLOWEST_BYTES_PER_S, TransferGivenUpError, watched

RATE = SLOWEST_BYTES_PER_S


def transfer(paces: list[float], num_bytes: int, seconds: float = 1.0) -> int:
    """Take what comes at some paces, in units of the slowest, for some seconds each."""
    pieces = iter([*(bytes(int(pace * RATE * seconds)) for pace in paces), b""])
    ticks = itertools.count()
    clock = lambda: seconds * next(ticks)  # noqa: E731
    found = watched(lambda: next(pieces), num_bytes, slow_s=10.0, clock=clock)
    return sum(map(len, found))


@pytest.mark.parametrize(
    "paces",
    [
        [1.0] * 40,
        [5.0] * 2 + [0.001] * 7 + [5.0] * 2,  # it recovers in time
        [0.1] * 9,  # it ends in time
        [0.1] * 10,
    ],
)
def test_what_is_fast_enough_comes(paces: list[float]) -> None:
    num_bytes = sum(int(pace * RATE) for pace in paces)
    assert transfer(paces, num_bytes) == num_bytes


@pytest.mark.parametrize(
    "paces", [[0.9] * 40, [0.001] * 40, [50.0] * 10 + [0.1] * 30, [0.1] * 9 + [0.2] * 2]
)
def test_what_is_slow_for_long_is_given_up(paces: list[float]) -> None:
    with pytest.raises(TransferGivenUpError, match=r"too slow: .* 5,000 a second are the least"):
        transfer(paces, 10**9)


def test_what_is_too_large_is_given_up() -> None:
    assert transfer([1.0] * 3, 3 * RATE) == 3 * RATE
    with pytest.raises(TransferGivenUpError, match=r"larger than the file's 14,999 bytes"):
        transfer([1.0] * 3, 3 * RATE - 1)
