"""Which tests fail for a reason that we know, and have decided to live with?

One that is listed and passes is told too, so the list stays true.
"""

from __future__ import annotations

EVERYWHERE = {
    "test_ddp_hook_pickling_powerSGD": (
        "torch's own mistake: it loads a pickle of an object as if it were weights"
    ),
}
ON_OUR_BACKEND = {
    "test_ddp_profiling_torch_profiler": (
        "wants collectives recorded as asynchronous; ours are carried out when they are called"
    ),
}


def expected_failures(backend: str) -> dict[str, str]:
    """Tell the tests that are known to fail on a backend, with the reason."""
    return EVERYWHERE | (ON_OUR_BACKEND if backend == "unisono" else {})
