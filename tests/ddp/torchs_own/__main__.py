"""torch's own tests of DDP, with a class on a backend, or with ``--all`` of both, without a GPU.

The exit status is 1 if one fails that is not known to, or one of those passes or fails otherwise.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
import time
import warnings
from collections import Counter

os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
os.environ.setdefault("WORLD_SIZE", "2")  # torch's test module reads it when it is imported
warnings.simplefilter("ignore")

import torch  # noqa: E402
import torch._dynamo  # noqa: E402  # which each DDP would load
import torch.nn.parallel  # noqa: E402
from tests.ddp.torchs_own.on_cpu import load_tests, without_devices  # noqa: E402
from tests.ddp.torchs_own.ranks import FAILED, PASSED, run_on_ranks  # noqa: E402
from tests.ddp.torchs_own.which import (  # noqa: E402
    expected_failures,
    names_of_tests,
    needs_accelerator,
)

import unisono  # noqa: E402

COMBINATIONS = [("gloo", "torch"), ("gloo", "ours"), ("unisono", "torch"), ("unisono", "ours")]
CLASSES = {
    "torch": torch.nn.parallel.DistributedDataParallel,
    "ours": unisono.distributed.DistributedDataParallel,
}
_LIMIT_S = 300.0


def main() -> int:
    """Run what was asked for; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--backend", default="unisono")
    parser.add_argument("--class", dest="cls", choices=CLASSES, default="ours")
    parser.add_argument("--all", action="store_true", help="every backend with every class")
    parser.add_argument("-n", type=int, default=3, help="how many ranks; 3 by default")
    parser.add_argument("-k", default="", help="only tests whose name this pattern is found in")
    options = parser.parse_args()

    torch.set_num_threads(1)  # and no threads before a fork
    module = load_tests()
    names = [name for name in names_of_tests(module) if re.search(options.k, name)]
    counted = [name for name in names if not needs_accelerator(name)]
    print(f"{len(names)} tests make a DDP, {len(names) - len(counted)} need a GPU", flush=True)
    surprises = 0
    for backend, cls in COMBINATIONS if options.all else [(options.backend, options.cls)]:
        torch.nn.parallel.DistributedDataParallel = without_devices(CLASSES[cls])
        module.DistributedDataParallel = torch.nn.parallel.DistributedDataParallel
        known, count = expected_failures(backend, cls, options.n), Counter()
        begun_s = time.monotonic()
        for name in counted:
            result, said = run_on_ranks(module, name, backend, options.n, _LIMIT_S)
            count[result] += 1
            print(f"{result:8} {name} on {backend} with {cls}", flush=True)
            is_known = name in known and known[name] in said
            if (result == FAILED and not is_known) or (result == PASSED and name in known):
                surprises += 1
                print(f"NOT EXPECTED: {said}")
        print(f"{backend} with {cls}: {dict(count)} in {time.monotonic() - begun_s:.0f} s")
    return 1 if surprises else 0


if __name__ == "__main__":
    sys.exit(main())
