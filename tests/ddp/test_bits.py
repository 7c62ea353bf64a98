"""No option of DDP changes a bit, on any backend."""

import pytest
import torch
import torch._dynamo
from tests.ddp.training import digest, made, train

pytestmark = pytest.mark.slow

VARIANTS = {
    "as it is": {},
    "one bucket": {"bucket_cap_mb": 25},
    "many buckets": {"bucket_cap_mb": 0.01},
    "unused parameters": {"find_unused_parameters": True, "bucket_cap_mb": 0.03},
    "static graph": {"static_graph": True, "bucket_cap_mb": 0.01},
    "views": {"gradient_as_bucket_view": True, "bucket_cap_mb": 0.02},
    "views, kept": {"gradient_as_bucket_view": True, "set_to_none": False},
    "everything": {
        "gradient_as_bucket_view": True,
        "find_unused_parameters": True,
        "bucket_cap_mb": 0.01,
        "set_to_none": False,
    },
    "copied together": {"batched_grad_copy": True, "bucket_cap_mb": 0.05},
    "a list of buckets": {"bucket_cap_mb_list": [0.005, 0.02, 0.1]},
}


def digests(cls, dtype=torch.float32):
    found = {}
    for name, options in VARIANTS.items():
        options = dict(options)
        kept = options.pop("set_to_none", True)
        ddp = made(cls, dtype, **options)
        found[name] = digest(ddp, train(ddp, 3, kept, dtype))
    return found


def all_of(results):
    return {digest for result in results for digest in result.values()}


def long(world_size, dtype=torch.float32):
    return pytest.param(world_size, dtype, marks=pytest.mark.long)


@pytest.mark.parametrize(
    ("world_size", "dtype"),
    [(3, torch.float32), *map(long, (1, 2, 4, 5)), long(3, torch.float64), long(3, torch.bfloat16)],
)
def test_no_option_and_no_backend_changes_a_bit(on_ranks, world_size, dtype):
    ours = all_of(on_ranks("unisono", world_size, digests, "ours", dtype))
    assert len(ours) == 1
    assert ours == all_of(on_ranks("gloo", world_size, digests, "ours", dtype))


def test_torchs_class_on_gloo_changes_bits_with_the_size_of_buckets(on_ranks):
    (result, *_) = on_ranks("gloo", 3, digests, "torch")
    assert result["one bucket"] != result["many buckets"]
    assert len(set(result.values())) > 2


@pytest.mark.long
def test_torchs_class_on_our_backend_has_the_same_bits_unless_gradients_are_views(on_ranks):
    results = on_ranks("unisono", 3, digests, "torch")
    for result in results:
        for divided in ("views, kept", "everything", "copied together"):
            assert result.pop(divided) != result["as it is"]  # x / 3 is not x · (1/3)
    assert all_of(results) == all_of(on_ranks("unisono", 3, digests, "ours"))


def ask_for_the_reducer_in_python():
    with torch._dynamo.config.patch(optimize_ddp="python_reducer"):
        made("ours")


@pytest.mark.parametrize("backend", ["gloo", "unisono"])
def test_the_reducer_in_python_is_refused_where_it_would_give_other_bits(on_ranks, backend):
    with pytest.raises(Exception, match="divides and sums gradients in a different order"):
        on_ranks(backend, 3, ask_for_the_reducer_in_python)
