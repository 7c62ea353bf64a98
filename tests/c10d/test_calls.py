"""What a rank posts about a call: words, which the others compare and show."""

import torch

from unisono.runtime.c10d.calls import encode
from unisono.runtime.c10d.group_memory import POST_TEXT_BYTES

F32, I64 = torch.float32, torch.int64


def test_calls_that_differ_in_shape_or_sizes_have_other_bytes():
    calls = {
        encode("broadcast", F32, 6, root=0, shape=shape) for shape in [(6,), (2, 3), (3, 2), (1, 6)]
    } | {encode("all_to_all", F32, sizes=sizes) for sizes in [(2, 3), (3, 2), (1, 4)]}
    assert len(calls) == 7


def test_a_call_of_many_words_is_cut_and_still_differs_from_others():
    shapes = [(1,) * 99 + (size,) for size in (2, 3)]
    calls = {encode("broadcast", F32, 6, root=0, shape=shape) for shape in shapes}
    assert len(calls) == 2
    for call in calls:
        assert len(call) == POST_TEXT_BYTES
        assert call.decode(errors="replace").startswith("broadcast of 6 float32 elements in the")
