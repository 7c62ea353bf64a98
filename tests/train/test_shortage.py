"""What is said where memory is full: what took it, what there is, what helps."""

import pytest

from unisono.train.shortage import Shortage, in_words

GIB = 2**30
FULL = {
    "device": "cuda:1",
    "rank": 1,
    "phase": "backward pass",
    "step": 12,
    "shard": 3,
    "needed": {"parameters": GIB // 2, "optimizer state": GIB},
    "peak": 20 * GIB,
    "total": 24 * GIB,
    "free": GIB,
    "reserved": 23 * GIB,
    "shards": 8,
    "batch_size": 64,
    "precision": "fp32",
}


def told(**change):
    return in_words(Shortage(**{**FULL, **change}))


def test_a_pass_says_where_what_and_what_to_do():
    assert told() == (
        "the memory of cuda:1 must hold what the backward pass of shard 3 in step 12 needs, but "
        "rank 1 found it full: parameters 512 MiB, optimizer state 1 GiB, activations and "
        "temporary tensors up to 18.5 GiB so far; it has 24 GiB. To make room: pass "
        "`shards=16` (now 8), so that each pass has half as many samples at the same batch size; "
        'other shards give other bits; or pass `precision="bf16"`; or have the model recompute '
        "activations (`torch.utils.checkpoint`)."
    )


REMEDIES = {
    "fewer samples than twice the shards": ({"batch_size": 12}, "`shards=12` (now 8)", ""),
    "a sample a pass": ({"batch_size": 8}, "`precision", "`shards="),
    "no batch yet": ({"batch_size": None}, "`shards=16`", ""),
    "bf16 already": ({"precision": "bf16"}, "torch.utils.checkpoint", "bf16"),
    "a loop of one's own": ({"precision": None}, "torch.autocast", "`precision"),
    "a shared device": ({"workers_per_device": 2}, "fewer workers (now 2)", "other processes"),
    "somebody else's": ({"reserved": 13 * GIB}, "other processes take 10 GiB", "fewer workers"),
    "little of somebody else's": ({"reserved": 23 * GIB - GIB // 5}, "", "other processes"),
    "an update": ({"phase": "update", "shard": None}, "`foreach=False`", "`shards="),
    "an evaluation": (
        {"phase": "pass of `evaluate`", "shard": None},
        "pass a smaller `batch_size` there",
        "`shards=",
    ),
    "the start": ({"phase": "start of the loop", "shard": None}, "a smaller model", "precision"),
}


@pytest.mark.parametrize(("change", "there", "missing"), REMEDIES.values(), ids=list(REMEDIES))
def test_only_what_may_help_is_named(change, there, missing):
    assert there in told(**change)
    assert not missing or missing not in told(**change)


def test_what_nobody_knows_is_left_out():
    words = told(peak=None, total=None, free=None, step=None, shard=None, phase="evaluation")
    assert "activations and" not in words
    assert "it has" not in words
    assert " in step " not in words


def test_the_host_is_called_what_it_is():
    words = told(is_host=True, device="cpu", peak=None, free=0, reserved=0)
    assert words.startswith("the memory of this machine must hold")
    assert "other processes" not in words


def test_activations_are_what_the_peak_has_beyond_the_rest():
    assert Shortage(**FULL).all_needed["activations"] == 20 * GIB - 3 * GIB // 2
    assert Shortage(**{**FULL, "peak": 5}).activations == 0
