"""Heartbeats, here between objects of one process."""

import pytest
from torch._C._distributed_c10d import HashStore

from unisono.runtime.workers.host_member import Heartbeats

HERE = "127.0.0.1"


@pytest.fixture
def signs():
    store = HashStore()
    made = [Heartbeats(store, rank, HERE) for rank in range(2)]
    yield made
    for one in made:
        one.hide()


def test_who_never_came_is_silent_from_the_first_look_on(signs):
    first = signs[0].silent_s(1)
    assert 0 <= first < signs[0].silent_s(1)


def test_who_shows_itself_is_seen_without_a_word_until_it_ends(signs):
    me, other = signs
    me.silent_s(1)
    other.show()
    assert [me.silent_s(1) for _ in range(3)] == [0.0] * 3
    other.hide()
    while not me.silent_s(1):
        continue
    other.show()  # another process, at another address
    assert me.silent_s(1) == 0.0
