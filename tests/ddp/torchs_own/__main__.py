"""torch's own tests of DDP, on a backend and with a class of DDP, without a GPU.

    python -m tests.ddp.torchs_own                       # our class on our backend
    python -m tests.ddp.torchs_own --backend gloo --class torch
    python -m tests.ddp.torchs_own --all                 # every combination, and a table

Which tests count is said in ``which.py``, which may fail, and how, in ``expected.py``. The exit
status is 1 if another one fails, or one of those passes or fails in another way.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
import time
import warnings
from collections import Counter
from collections.abc import Sequence

os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
os.environ.setdefault("WORLD_SIZE", "2")  # torch's test module reads it when it is imported
warnings.simplefilter("ignore")

import torch  # noqa: E402
import torch._dynamo  # noqa: E402  # which each DDP would load
import torch.nn.parallel  # noqa: E402
from tests.ddp.torchs_own.expected import expected_failures  # noqa: E402
from tests.ddp.torchs_own.on_cpu import load_tests, without_devices  # noqa: E402
from tests.ddp.torchs_own.ranks import FAILED, PASSED, SKIPPED, run_on_ranks  # noqa: E402
from tests.ddp.torchs_own.which import names_of_tests, why_left_out  # noqa: E402

import unisono  # noqa: E402

COMBINATIONS = [("gloo", "torch"), ("gloo", "ours"), ("unisono", "torch"), ("unisono", "ours")]
CLASSES = {
    "torch": torch.nn.parallel.DistributedDataParallel,
    "ours": unisono.distributed.DistributedDataParallel,
}
_LIMIT_S = 300.0


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what was asked for; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--backend", default="unisono")
    parser.add_argument("--class", dest="cls", choices=CLASSES, default="ours")
    parser.add_argument("--all", action="store_true", help="every backend with every class")
    parser.add_argument("-n", type=int, default=3, help="how many ranks; 3 by default")
    parser.add_argument("-k", default="", help="only tests whose name this pattern is found in")
    options = parser.parse_args(arguments)

    torch.set_num_threads(1)  # and no threads before a fork
    module = load_tests()
    names = [name for name in names_of_tests(module.__file__) if re.search(options.k, name)]
    counted = [name for name in names if not why_left_out(name)]
    print(f"{len(names)} tests make a DDP, {len(names) - len(counted)} need a GPU", flush=True)
    combinations = COMBINATIONS if options.all else [(options.backend, options.cls)]
    counts, surprises = {}, []
    for backend, cls in combinations:
        start = time.monotonic()
        counts[backend, cls] = count = Counter()
        for name in counted:
            count[_run(module, name, backend, cls, options.n, surprises)] += 1
        count["seconds"] = round(time.monotonic() - start)
    _print_table(counts)
    for surprise in surprises:
        print(f"NOT EXPECTED: {surprise}")
    return 1 if surprises else 0


def _run(
    module: object, name: str, backend: str, cls: str, num_ranks: int, surprises: list[str]
) -> str:
    ddp = without_devices(CLASSES[cls])
    torch.nn.parallel.DistributedDataParallel = module.DistributedDataParallel = ddp
    start = time.monotonic()
    outcome = run_on_ranks(module, name, backend, num_ranks, _LIMIT_S)
    seconds = time.monotonic() - start
    known = expected_failures(backend, cls, num_ranks).get(name)
    what, why = f"{name} on {backend} with {cls}", known.reason if known else outcome.reason
    print(f"{outcome.result:8}{seconds:6.1f} s  {what}  {why}", flush=True)
    if outcome.result == PASSED and known:
        surprises.append(f"{what} passed, and was expected to fail: {known.reason}")
    elif outcome.result == FAILED and not (known and known.shown in outcome.output):
        surprises.append(f"{what} failed: {outcome.reason}")
        print(outcome.output)
    return outcome.result


def _print_table(counts: dict[tuple[str, str], Counter[str]]) -> None:
    columns = (PASSED, FAILED, SKIPPED, "seconds")
    print(f"\n{'backend':10}{'class':8}" + "".join(f"{column:>9}" for column in columns))
    for (backend, cls), count in counts.items():
        print(f"{backend:10}{cls:8}" + "".join(f"{count[column]:9}" for column in columns))


if __name__ == "__main__":
    sys.exit(main())
