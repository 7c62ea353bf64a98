"""Attempts of a job that only rank 0 can tell apart."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
from torch._C._distributed_c10d import HashStore

from unisono.errors import WaitTimeoutError
from unisono.runtime.workers.rendezvous import Attempts
from unisono.runtime.world import World

WORLD_SIZE = 4


def attempt(store, ranks):
    """What the ranks that come hear; rank 0, if it comes, answers until all of them have."""
    within_s = 20.0 if 0 in ranks else 0.05
    ones = {rank: Attempts(store, World(rank, WORLD_SIZE)) for rank in ranks if rank}
    with ThreadPoolExecutor(WORLD_SIZE) as pool:
        joining = {rank: pool.submit(one.join, "here", within_s, "") for rank, one in ones.items()}
        heard = {}
        if 0 in ranks:
            first = Attempts(store, World(0, WORLD_SIZE))
            heard[0] = first.join("here", within_s, "")
            while not all(one.done() for one in joining.values()):
                first.answer()
        return heard | {rank: one.exception() or one.result() for rank, one in joining.items()}


@pytest.mark.parametrize(
    "came",
    [
        [{0, 1, 2, 3}, {0, 1, 2, 3}],
        [{0, 2}, {0, 1, 2, 3}],
        [{1, 2, 3}, {0, 1, 2, 3}],
        [{0}, {1, 3}, {0, 3}, {0, 1, 2, 3}, {0, 1, 2, 3}],
    ],
)
def test_all_who_come_to_an_attempt_hear_the_same_number_and_never_again(came):
    store, numbers = HashStore(), []
    for ranks in came:
        heard = attempt(store, ranks)
        if 0 not in ranks:
            assert all(isinstance(error, WaitTimeoutError) for error in heard.values())
            continue
        assert heard.keys() == ranks
        (number,) = set(heard.values())
        numbers.append(number)
    assert len(set(numbers)) == len(numbers)
