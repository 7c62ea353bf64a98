"""One test on W ranks, each a process forked from one that has loaded torch and the tests."""

from __future__ import annotations

import contextlib
import os
import signal
import tempfile
import time
import traceback
import unittest
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist
from tests.ddp.torchs_own.on_cpu import stay_on_cpu
from torch.testing._internal.common_distributed import TEST_SKIPS
from torch.testing._internal.common_utils import set_rng_seed

PASSED, FAILED, SKIPPED = "passed", "failed", "skipped"
_RESULTS = [PASSED, FAILED, SKIPPED]  # by exit status; others are failures, too
_OTHERS_GET_S = 3.0  # once one has failed


def run_on_ranks(
    module: Any, name: str, backend: str, world_size: int, limit_s: float
) -> tuple[str, str]:
    """Run a test of torch's on forked ranks; gives the worst result, and what that rank said."""
    with tempfile.TemporaryDirectory() as folder:
        for part in ("barrier", "test_dir", "init_dir"):
            Path(folder, part).mkdir()
        ranks: dict[int, int] = {}
        for rank in range(world_size):
            if (pid := os.fork()) == 0:
                os._exit(_rank(module, name, backend, rank, world_size, folder))
            ranks[pid] = rank
        said = {PASSED: ""}
        end = time.monotonic() + limit_s
        while ranks and time.monotonic() < end:
            for pid, rank in list(ranks.items()):
                ended, status = os.waitpid(pid, os.WNOHANG)
                if ended:
                    del ranks[pid]
                    code = os.waitstatus_to_exitcode(status)
                    result = _RESULTS[code] if 0 <= code < len(_RESULTS) else FAILED
                    output = Path(f"{folder}/output{rank}").read_text(errors="replace")
                    said.setdefault(result, output[-4000:] or f"exit status {code}")
                    if result == FAILED:
                        end = min(end, time.monotonic() + _OTHERS_GET_S)
            time.sleep(0.01)
        for pid in ranks:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            said.setdefault(FAILED, "did not end in time")
        return next((one, said[one]) for one in (FAILED, SKIPPED, PASSED) if one in said)


def _rank(module: Any, name: str, backend: str, rank: int, world_size: int, folder: str) -> int:
    output = os.open(f"{folder}/output{rank}", os.O_CREAT | os.O_RDWR | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    try:
        _run(module, name, backend, rank, world_size, folder)
    except unittest.SkipTest as skipped:
        os.write(1, str(skipped).encode())
        return _RESULTS.index(SKIPPED)
    except SystemExit as ended:
        skips = [skip.message for skip in TEST_SKIPS.values() if skip.exit_code == ended.code]
        os.write(1, (skips or [f"exit status {ended.code}"])[0].encode())
        return _RESULTS.index(SKIPPED if skips else FAILED)
    except BaseException:
        os.write(1, traceback.format_exc().encode())
        return _RESULTS.index(FAILED)
    return _RESULTS.index(PASSED)


def _run(module: Any, name: str, backend: str, rank: int, world_size: int, folder: str) -> None:
    os.environ |= {"TEMP_DIR": folder, "WORLD_SIZE": str(world_size)}
    case_class = type("Case", (module.TestDistBackend, module.DistributedTest._DistTestBase), {})
    mode = stay_on_cpu(rank, world_size)
    case = case_class(name)
    case.rank, case.file_name = rank, f"{folder}/rendezvous"
    dist.init_process_group(
        backend,
        init_method=case.init_method,
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=module.CUSTOM_PG_TIMEOUT.get(name, module.default_pg_timeout)),
    )
    case._barrier()
    set_rng_seed()
    with mode:
        getattr(case, name)()
    case._barrier()
    if dist.is_initialized():
        dist.destroy_process_group()
