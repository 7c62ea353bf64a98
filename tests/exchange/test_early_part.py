"""Parameters of a part that are published one at a time, and the buckets they are copied in."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.device import ranks

from unisono.engine.exchange import host_memory
from unisono.engine.exchange.arena import lay_out
from unisono.engine.exchange.early_part import PartBuckets
from unisono.runtime.device import Copies


def slots_of(*numels):
    return lay_out({str(n): torch.empty(numel) for n, numel in enumerate(numels)})


@pytest.mark.slow
@given(
    numels=st.lists(st.integers(0, 60), max_size=8),
    num_bytes=st.sampled_from([1, 100, 500, 10_000]),
    data=st.data(),
)
def test_every_byte_is_given_after_its_last_change(numels, num_bytes, data):
    slots = slots_of(*numels)
    buckets = PartBuckets(slots, num_bytes)
    there, copied = [0] * len(slots), [None] * len(slots)

    def copy(spans):
        for start, stop in spans:
            for index, slot in enumerate(slots):
                if start <= slot.offset and slot.end <= stop:
                    copied[index] = there[index]

    indices = st.integers(0, len(slots) - 1)
    for index in data.draw(st.lists(indices, max_size=20)) if slots else []:
        there[index] += 1
        copy([buckets.spans[number] for number in buckets.mark(index)])
    for index in data.draw(st.lists(indices, max_size=3)) if slots else []:
        there[index] += 1
        buckets.mark_changed([index])
    copy(buckets.rest())
    assert copied == there


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [2, 3])
def test_buckets_of_any_size_give_the_same_bits(accelerator, control_of, world_size):
    expected = ranks.run(control_of(1), kind="cpu", optimizer="adam")[0]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(host_memory, "BUCKET_BYTES", 64)
        results = ranks.run(control_of(world_size), optimizer="adam")
    assert list(results.values()) == [expected] * world_size


@pytest.mark.slow
def test_buckets_are_copied_before_the_backward_pass_ends(accelerator, control_of):
    seen = []

    def to_host(copies, into, source):
        seen.append(("copy", len(into)))
        original(copies, into, source)

    def mark(buckets, index):
        seen.append(("gradient", index))
        return of_gradient(buckets, index)

    original, of_gradient = Copies.to_host, PartBuckets.mark
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(host_memory, "BUCKET_BYTES", 64)
        patch.setattr(Copies, "to_host", to_host)
        patch.setattr(PartBuckets, "mark", mark)
        ranks.run(control_of(2), optimizer="adam")
    kinds = [kind for kind, _ in seen]
    last = len(kinds) - kinds[::-1].index("gradient")
    assert "copy" in kinds[kinds.index("gradient") : last]
