"""Buckets are ready once all workers of a host have come to them, in one order."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unisono.engine.exchange.ready_buckets import ReadyBuckets

INDICES = [(3, 4), (2, 3), (0, 1)]  # a parameter may be in several


def workers(number, start=0):
    counts = [memoryview(bytearray(start.to_bytes(4, "little") * 16)) for _ in range(number)]
    return [ReadyBuckets(counts, position, INDICES) for position in range(number)]


@pytest.mark.parametrize("start", [0, 2**32 - 2])  # the counts may pass the largest number
def test_a_bucket_is_ready_when_the_last_worker_has_come_to_it(start):
    one, other = workers(2, start)
    for _ in range(3):  # steps
        one.begin()
        for index in (3, 4):
            one.mark(index)
        assert one.count() == 0
        other.begin()
        other.mark_all()
        assert (one.count(), other.count()) == (1, 1)
        one.mark(1)
        assert one.count() == 1  # in one order
        one.mark_all()
        assert (one.count(), other.count()) == (3, 3)


@pytest.mark.slow
@given(orders=st.tuples(*[st.permutations(range(5))] * 2), data=st.data())
def test_no_bucket_is_ready_before_all_its_gradients_are_there(orders, data):
    both = workers(2)
    there = [set(), set()]
    at = [0, 0]
    while min(at) < 5:
        who = data.draw(st.sampled_from([who for who in (0, 1) if at[who] < 5]))
        index = orders[who][at[who]]
        at[who] += 1
        there[who].add(index)
        both[who].mark(index)
        ready = [set(own) <= there[0] & there[1] for own in INDICES]
        expected = ready.index(False) if False in ready else len(ready)
        assert [one.count() for one in both] == [expected] * 2
    assert not any(one.is_outdated for one in both)


def test_what_changes_after_its_bucket_was_ready_is_outdated():
    (one,) = workers(1)
    for index in (3, 4, 3):
        one.mark(index)
    assert one.is_outdated
    one.mark_all()
    one.begin()
    one.mark(2)
    one.mark_changed([2])
    assert not one.is_outdated
    one.mark_all()
    one.mark_changed([2])
    assert one.is_outdated
