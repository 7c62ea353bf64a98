"""Buckets hold every parameter once, from the last to the first, and slices every byte once.

They leave in one order, whenever their gradients come; what never comes holds nobody up.
"""

import random
import threading

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.threads import in_threads

from unisono.engine.exchange.arena import Slot, lay_out
from unisono.engine.exchange.bucket_pipeline import BucketPipeline, lay_out_buckets
from unisono.engine.exchange.communicator import BrokenError, Communicator, Transfer
from unisono.engine.exchange.group_exchange import BucketSums
from unisono.engine.exchange.parts import OwnParts, Parts
from unisono.plan.summation import Node, tree_sum
from unisono.runtime.device import host
from unisono.runtime.workers.memory import ALIGNMENT_BYTES

DTYPES = (torch.float32, torch.bfloat16, torch.float64)


def slot(numel, dtype=torch.float32):
    return Slot(str(numel), 0, (numel,), (1,), dtype, numel)


@pytest.mark.parametrize(
    ("numels", "first_bytes", "bucket_bytes", "buckets"),
    [
        ([10], 1, 1, [[0]]),
        ([10, 10, 10], 1, 1, [[2], [1], [0]]),
        ([10, 10, 10], 1 << 20, 1, [[0, 1, 2]]),
        ([10, 10, 10, 10], 1, 1 << 20, [[3], [0, 1, 2]]),
        ([16, 16, 16, 16, 16], 64, 128, [[4], [2, 3], [0, 1]]),  # 64 bytes each
        ([16, 16, 16, 16], 64, 128, [[3], [1, 2], [0]]),
        ([1000, 1, 1], 64, 128, [[2], [0, 1]]),
        ([0, 0], 64, 64, [[0, 1]]),
    ],
)
def test_a_bucket_is_full_at_its_size(numels, first_bytes, bucket_bytes, buckets):
    layout = lay_out_buckets([slot(n) for n in numels], 2, first_bytes, bucket_bytes)
    assert [list(bucket.indices) for bucket in layout.buckets] == buckets


@st.composite
def cases(draw):
    slots = draw(
        st.lists(st.builds(slot, st.integers(0, 300), st.sampled_from(DTYPES)), min_size=1)
    )
    world_size = draw(st.integers(1, 9))
    sizes = draw(st.tuples(st.integers(1, 3000), st.integers(1, 3000)))
    return slots, world_size, draw(st.integers(1, world_size)), sizes


@pytest.mark.slow
@given(case=cases())
def test_every_element_is_in_one_slice_of_one_bucket(case):
    slots, world_size, num_workers, sizes = case
    layout = lay_out_buckets(slots, world_size, *sizes)
    assert [i for b in reversed(layout.buckets) for i in b.indices] == list(range(len(slots)))
    seen = {index: [] for index in range(len(slots))}
    for number, bucket in enumerate(layout.buckets):
        assert {layout.bucket_of[index] for index in bucket.indices} == {number}
        for position in range(num_workers):
            for piece in bucket.pieces(position, num_workers):
                seen[bucket.indices[piece.index]] += range(piece.start, piece.stop)
    assert seen == {index: list(range(slot.numel)) for index, slot in enumerate(slots)}


@pytest.mark.slow
@given(case=cases())
def test_no_slice_reaches_into_another_bucket(case):
    slots, world_size, num_workers, sizes = case
    layout = lay_out_buckets(slots, world_size, *sizes)
    ends = [bucket.start for bucket in layout.buckets[1:]] + [layout.num_bytes]
    for bucket, end in zip(layout.buckets, ends, strict=True):
        length = bucket.slice_bytes(num_workers)
        assert length % ALIGNMENT_BYTES == 0
        assert bucket.num_bytes <= num_workers * length <= end - bucket.start
        for index, relative in zip(bucket.indices, bucket.slots, strict=True):
            assert layout.slots[index].offset == bucket.start + relative.offset


# Sending them


NUMELS = (40, 3, 7, 100, 20, 1)
HELD = [[Node(0, 2)], [Node(2, 3), Node(3, 4)], [Node(4, 6)]]
NUM_SHARDS, SIZE = 6, len(HELD)
ARRIVES_WITHIN_S = 20.0


class Wires:
    """Between threads: the bytes of a call are there once every member has made it."""

    def __init__(self):
        self.changed = threading.Condition()
        self.calls = {}  # (kind, number) → {position: (received, pieces sent to each)}
        self.whole = set()
        self.is_cut = False

    def make(self, kind, number, position, received, sent):
        with self.changed:
            calls = self.calls.setdefault((kind, number), {})
            calls[position] = (received, sent)
            if len(calls) == SIZE:
                for to, (place, _) in calls.items():
                    place.copy_(torch.cat([calls[of][1][to] for of in range(SIZE)]))
                self.whole.add((kind, number))  # not before: members look without a lock
            self.changed.notify_all()

    def is_whole(self, kind, number):
        return (kind, number) in self.whole


class Wired(Transfer):
    def __init__(self, wires, kind, number):
        self.wires, self.call = wires, (kind, number)

    @property
    def is_ready(self):
        return self.wires.is_whole(*self.call)

    def join(self):
        assert self.is_ready


class Member(Communicator):
    """One member, which notes its calls."""

    def __init__(self, wires, position):
        self.wires, self.position = wires, position
        self.begun = {"send": 0, "give": 0}

    def all_to_all(self, received, sent, from_each, to_each):
        return self._begin("send", received, sent.split(to_each))

    def all_gather(self, received, sent):
        return self._begin("give", received, [sent] * SIZE)

    def wait(self, transfer, patience_s=None):
        wires = self.wires
        with wires.changed:
            came = wires.changed.wait_for(
                lambda: wires.is_cut or wires.is_whole(*transfer.call), ARRIVES_WITHIN_S
            )
        assert came, f"rank {self.position} waits for {transfer.call} for ever: {wires.calls}"
        if wires.is_cut:
            raise BrokenError("a cable is cut")
        return True

    def close(self):
        pass

    def _begin(self, kind, received, sent):
        if self.wires.is_cut:
            raise BrokenError("a cable is cut")
        number, self.begun[kind] = self.begun[kind], self.begun[kind] + 1
        self.wires.make(kind, number, self.position, received, list(sent))
        return Wired(self.wires, kind, number)


def gradients_of(shard):
    generator = torch.Generator().manual_seed(shard)
    drawn = [torch.randn(numel, generator=generator) * 10.0 ** (shard % 3) for numel in NUMELS]
    return [None if (shard + index) % 4 == 0 else g for index, g in enumerate(drawn)]


def add(left, right):
    return [b if a is None else a if b is None else a + b for a, b in zip(left, right, strict=True)]


def sum_of(shards):
    return tree_sum([gradients_of(shard) for shard in shards], add)


def layout():
    return lay_out_buckets(lay_out({str(n): torch.zeros(n) for n in NUMELS}), SIZE, 64, 128)


@pytest.fixture
def run():
    def run_work(work):
        """Run ``work(position, pipeline, parts, member)`` on each member, in threads."""
        flags = [bytearray(len(NUMELS) + 1) for _ in range(NUM_SHARDS)]
        wires = Wires()

        def live(position):
            buckets = layout()
            rows = list(map(memoryview, flags))
            own = OwnParts(buckets.slots, rows, buckets.num_bytes, host())
            all_sums = BucketSums(buckets, own, HELD, position, host())
            pipeline = BucketPipeline(all_sums.buckets, buckets.bucket_of)
            pipeline.sums = all_sums
            return work(position, pipeline, Parts(own), Member(wires, position))

        results = in_threads(SIZE, live)
        assert not any(isinstance(result, Exception) for result in results), results
        return results

    return run_work


def publish(position, pipeline, parts, member, order):
    """Publish earlier parts whole and the last one in some order, as far as it has gradients."""
    *others, last = HELD[position]
    for part in others:
        parts.publish(part, sum_of(range(part.lo, part.hi)))
    gradients = sum_of(range(last.lo, last.hi))
    parts.begin(last)
    for index in order:
        if gradients[index] is not None:
            parts.put(last, index, gradients[index])
            pipeline.mark_ready(index, member)


def sums(pipeline, member):
    assert pipeline.finish(member)
    assert not pipeline.failure
    return [
        whole.clone() if here else None
        for whole, here in zip(pipeline.sums.whole, pipeline.sums.present, strict=True)
    ]


def check(results):
    expected = sum_of(range(NUM_SHARDS))
    for found in results:
        for here, there in zip(found, expected, strict=True):
            assert (here is None) == (there is None)
            assert here is None or torch.equal(here, there)


@pytest.mark.parametrize("seed", range(20))
def test_all_sums_come_whatever_order_gradients_are_ready_in(run, seed):
    draw = random.Random(seed)
    orders = [draw.sample(range(len(NUMELS)), len(NUMELS)) for _ in range(SIZE)]

    def work(position, pipeline, parts, member):
        found = []
        for _ in range(2):  # steps
            publish(position, pipeline, parts, member, orders[position])
            found.append(sums(pipeline, member))
            pipeline.begin()
        return found

    results = run(work)
    for step in range(2):
        check([found[step] for found in results])


def test_a_bucket_leaves_as_soon_as_those_before_it_have_left(run):
    last_to_first = list(reversed(range(len(NUMELS))))

    def work(position, pipeline, parts, member):
        *others, last = HELD[position]
        for part in [*others, last]:
            parts.publish(part, sum_of(range(part.lo, part.hi)))
        sent = []
        for index in [0, 1, 2, *last_to_first[:3]]:
            pipeline.mark_ready(index, member)
            sent.append(member.begun["send"])
        sums(pipeline, member)
        return sent

    buckets = [list(bucket.indices) for bucket in layout().buckets]
    assert buckets == [[5], [4], [3], [1, 2], [0]]
    assert run(work) == [[0, 0, 0, 1, 2, 5]] * SIZE


def test_sums_are_given_on_while_gradients_still_come(run):
    met = threading.Barrier(SIZE)

    def work(position, pipeline, parts, member):
        for part in HELD[position]:
            parts.publish(part, sum_of(range(part.lo, part.hi)))
        for index in (5, 4):
            pipeline.mark_ready(index, member)
        met.wait()
        pipeline.mark_ready(3, member)  # the first bucket has come meanwhile
        given = member.begun["give"]
        check([sums(pipeline, member)])
        return given

    assert all(given >= 1 for given in run(work))


def test_a_failure_beside_the_backward_pass_is_told_at_the_end(run):
    met = threading.Barrier(SIZE)

    def work(position, pipeline, parts, member):
        for part in HELD[position]:
            parts.publish(part, sum_of(range(part.lo, part.hi)))
        pipeline.mark_ready(5, member)
        met.wait()
        member.wires.is_cut = True
        for index in (4, 3, 2, 1, 0):
            pipeline.mark_ready(index, member)  # raises nothing
        assert pipeline.finish(member)
        failure = pipeline.failure
        met.wait()
        member.wires.is_cut = False
        met.wait()
        pipeline.begin()  # the parts are where they were
        again = Member(member.wires, position)
        again.begun = {"send": 100, "give": 100}
        check([sums(pipeline, again)])
        return failure

    assert run(work) == ["a cable is cut"] * SIZE
