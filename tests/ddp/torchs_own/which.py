"""Which of torch's tests are about DDP and make sense without a GPU, and which are known to fail?

1. A test counts if it makes a ``DistributedDataParallel``, itself or through the methods it calls.
2. What torch skips on Linux, we skip, with its reason.
3. A test that needs an accelerator is left out. All others that ask for GPUs get the CPU instead
   (``on_cpu.py``).
"""

from __future__ import annotations

import inspect
import re
from typing import Any

_SYNC_BN = "torch refuses SyncBatchNorm on CPUs"
_STREAMS = "uses streams or events of an accelerator"
_DEVICE = "looks at `device_ids`, which CPUs have not"

NEEDS_ACCELERATOR = {
    r"test_DistributedDataParallel_SyncBatchNorm.*": _SYNC_BN,
    r"test_ddp_uneven_inputs_stop_iteration_sync_bn": _SYNC_BN,
    r"test_ddp_inference": _SYNC_BN,
    r"test_sync_bn_logged": _SYNC_BN,
    r"test_ddp_apply_optim_in_backward.*": _STREAMS,
    r"test_ddp_native_mixed_precision_(no_)?grad_as_bucket_view.*": _STREAMS,
    r"test_ddp_logging_data_gpu": _DEVICE,
    r"test_ddp_device": _DEVICE,
}


def names_of_tests(module: Any) -> list[str]:
    """Find the tests of torch's module that make a DDP, in its order."""
    there = vars(module.DistributedTest._DistTestBase).items()
    methods = {name: inspect.getsource(one) for name, one in there if inspect.isfunction(one)}

    def makes_ddp(name: str, above: tuple[str, ...] = ()) -> bool:
        if "DistributedDataParallel(" in methods[name]:
            return True
        called = re.findall(r"self\.(_\w+)\(", methods[name])
        inside = [other for other in called if other in methods and other not in above]
        return any(makes_ddp(other, (*above, name)) for other in inside)

    return [name for name in methods if name.startswith("test_") and makes_ddp(name)]


def needs_accelerator(name: str) -> bool:
    return any(re.fullmatch(pattern, name) for pattern in NEEDS_ACCELERATOR)


_PROFILER = "test_ddp_profiling_torch_profiler"


def expected_failures(backend: str, cls: str, num_ranks: int) -> dict[str, str]:
    """Tell the tests that are known to fail, each with a part of what it prints then."""
    # torch's own mistake: it loads a pickle of an object as if it were weights.
    known = {"test_ddp_hook_pickling_powerSGD": "UnpicklingError: Weights only load failed"}
    if backend == "unisono":  # whose collectives are done when they are called
        return known | {_PROFILER: "self.assertTrue(event.is_async)"}
    if cls == "ours" and num_ranks > 2:  # it exchanges by all_to_all
        return known | {_PROFILER: "Expected 6 but got 0"}
    return known
