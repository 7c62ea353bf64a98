"""Which tests fail for a reason that we know, and have decided to live with?

One that is listed and passes is told too, so the list stays true.
"""

from __future__ import annotations

_EVERYWHERE = {
    "test_ddp_hook_pickling_powerSGD": (
        "torch's own mistake: it loads a pickle of an object as if it were weights"
    ),
}
_PROFILER = "test_ddp_profiling_torch_profiler"
_ON_OUR_BACKEND = {
    _PROFILER: "wants collectives recorded as asynchronous; ours are done when they are called",
}
_EXCHANGED = {
    _PROFILER: "counts calls of all_reduce; on three ranks our class exchanges by all_to_all",
}


def expected_failures(backend: str, cls: str, num_ranks: int) -> dict[str, str]:
    """Tell the tests that are known to fail in a combination, with the reason."""
    if backend == "unisono":
        return _EVERYWHERE | _ON_OUR_BACKEND
    if cls == "ours" and num_ranks > 2:
        return _EVERYWHERE | _EXCHANGED
    return _EVERYWHERE
