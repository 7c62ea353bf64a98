"""Buckets hold every parameter once, from the last to the first, and slices every byte once.

They leave in one order, whenever their gradients come; what never comes holds nobody up.
"""

from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from unisono.engine.exchange.arena import Slot
from unisono.engine.exchange.bucket_pipeline import BucketPipeline, lay_out_buckets
from unisono.engine.exchange.communicator import BrokenError, Carrier, Transfer
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
    for bucket in layout.buckets:
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


class Round(Transfer):
    is_ready = False

    def join(self):
        pass


class Line(Carrier):
    """Brings what is waited for."""

    def __init__(self):
        self.begun, self.is_cut = [], False

    def begin(self, what):
        if self.is_cut:
            raise BrokenError("a cable is cut")
        self.begun.append((what, Round()))
        return self.begun[-1][1]

    def wait(self, transfer, patience_s=None):
        transfer.is_ready = True
        return True

    @property
    def said(self):
        return [what for what, _ in self.begun]


def transfer(number, line):
    yield line.begin(f"send {number}")
    return line.begin(f"give {number}")


INDICES = ([3], [1, 2], [0])


def begun(*indices):
    pipeline, line = BucketPipeline([partial(transfer, n) for n in range(3)], INDICES), Line()
    for index in indices:
        pipeline.mark_ready(index, line)
    return pipeline, line


def test_a_bucket_leaves_as_soon_as_it_and_those_before_it_are_ready():
    pipeline, line = begun(0, 1)
    assert line.said == []
    pipeline.mark_ready(3, line)
    assert line.said == ["send 0"]
    pipeline.mark_ready(2, line)
    assert line.said == ["send 0", "send 1", "send 2"]
    assert not pipeline.progress.is_outdated
    pipeline.mark_ready(2, line)
    assert pipeline.progress.is_outdated


def test_sums_are_given_on_while_gradients_still_come():
    pipeline, line = begun(3)
    line.wait(line.begun[0][1])
    pipeline.mark_ready(1, line)
    assert line.said == ["send 0", "give 0"]
    assert pipeline.finish(line)
    assert [one for one in line.said if "give" in one] == ["give 0", "give 1", "give 2"]


def test_a_failure_beside_the_backward_pass_is_told_at_the_end():
    pipeline, line = begun(3)
    line.is_cut = True
    for index in (2, 1, 0):
        pipeline.mark_ready(index, line)  # raises nothing
    assert pipeline.finish(line)
    assert pipeline.failure == "a cable is cut"
    line.is_cut = False
    pipeline.begin()
    assert pipeline.finish(line)
    assert not pipeline.failure
