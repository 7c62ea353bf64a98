"""What a rank posts about a call, and how the others say it in words."""

import pytest
import torch

from unisono.c10d.calls import CALL_BYTES, describe, encode

F32, I64 = torch.float32, torch.int64


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (encode("barrier"), "barrier"),
        (
            encode("all_reduce", F32, 1024, "SUM"),
            "all_reduce(SUM) of 1,024 float32 elements",
        ),
        (
            encode("broadcast", I64, 6, root=1, shape=(2, 3)),
            "broadcast of 6 int64 elements in the shape (2, 3) with root 1",
        ),
        (
            encode("broadcast", I64, 6, root=1, shape=(6,)),
            "broadcast of 6 int64 elements with root 1",
        ),
        (
            encode("all_to_all", F32, sizes=(1, 2, 3)),
            "all_to_all of float32 elements in parts of 3 different sizes (fingerprint ",
        ),
    ],
)
def test_a_call_is_told_in_words(call, words):
    assert len(call) == CALL_BYTES
    assert describe(call).startswith(words)


def test_calls_that_differ_in_shape_or_sizes_have_other_bytes():
    calls = {
        encode("broadcast", F32, 6, root=0, shape=shape) for shape in [(6,), (2, 3), (3, 2), (1, 6)]
    } | {encode("all_to_all", F32, sizes=sizes) for sizes in [(2, 3), (3, 2), (1, 4)]}
    assert len(calls) == 7
