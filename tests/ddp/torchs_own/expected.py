"""Which tests fail for a reason that we know, and have decided to live with?

One that is listed and passes is told too, and so is one that fails in another way, so the list
stays true.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Known:
    """Why a test fails.

    Attributes:
        reason: in words.
        shown: a part of what the failing test prints, as a sign that it is this failure.
    """

    reason: str
    shown: str


_EVERYWHERE = {
    "test_ddp_hook_pickling_powerSGD": Known(
        "torch's own mistake: it loads a pickle of an object as if it were weights",
        "UnpicklingError: Weights only load failed",
    ),
}
_PROFILER = "test_ddp_profiling_torch_profiler"
_ON_OUR_BACKEND = {
    _PROFILER: Known(
        "wants collectives recorded as asynchronous; ours are done when they are called",
        "self.assertTrue(event.is_async)",
    ),
}
_EXCHANGED = {
    _PROFILER: Known(
        "counts calls of all_reduce; on three ranks our class exchanges by all_to_all",
        "Expected 6 but got 0",
    ),
}


def expected_failures(backend: str, cls: str, num_ranks: int) -> dict[str, Known]:
    """Tell the tests that are known to fail in a combination."""
    known = _EVERYWHERE
    if backend == "unisono":
        return known | _ON_OUR_BACKEND
    if cls == "ours" and num_ranks > 2:
        return known | _EXCHANGED
    return known
