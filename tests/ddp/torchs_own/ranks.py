"""One test on W ranks, each a process forked from one that has loaded torch and the tests."""

from __future__ import annotations

import contextlib
import os
import pickle
import select
import signal
import tempfile
import time
import traceback
import unittest
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist
from tests.ddp.torchs_own.on_cpu import stay_on_cpu
from torch.testing._internal.common_distributed import TEST_SKIPS
from torch.testing._internal.common_utils import set_rng_seed

PASSED, FAILED, SKIPPED = "passed", "failed", "skipped"
_OTHERS_GET_S = 3.0  # once one has failed
_MESSAGE_BYTES = 60_000  # what a pipe takes without a reader


@dataclass(frozen=True)
class Outcome:
    """What came of a test: on one rank, or the worst of all."""

    result: str
    reason: str = ""
    output: str = ""


def run_on_ranks(module: Any, name: str, backend: str, world_size: int, limit_s: float) -> Outcome:
    """Run a test of torch's on forked ranks; all have ended when it returns."""
    with tempfile.TemporaryDirectory() as folder:
        for part in ("barrier", "test_dir", "init_dir"):
            Path(folder, part).mkdir()
        ranks = {}
        for rank in range(world_size):
            reader, writer = os.pipe()
            pid = os.fork()
            if pid == 0:
                os._exit(_rank(module, name, backend, rank, world_size, folder, writer))
            os.close(writer)
            ranks[pid] = reader
        try:
            return _worst(_collect(list(ranks.values()), limit_s))
        finally:
            for pid, reader in ranks.items():
                os.close(reader)
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)


def _collect(readers: list[int], limit_s: float) -> list[Outcome]:
    outcomes, end = [], time.monotonic() + limit_s
    waiting = list(readers)
    while waiting:
        ready, _, _ = select.select(waiting, [], [], max(0.0, end - time.monotonic()))
        if not ready:
            return [*outcomes, Outcome(FAILED, "did not end in time")]
        for reader in ready:
            waiting.remove(reader)
            message = os.read(reader, _MESSAGE_BYTES)
            outcomes.append(Outcome(*pickle.loads(message)) if message else _DIED)
            if outcomes[-1].result == FAILED:
                end = min(end, time.monotonic() + _OTHERS_GET_S)
    return outcomes


_DIED = Outcome(FAILED, "its process died")


def _worst(outcomes: list[Outcome]) -> Outcome:
    for result in (FAILED, SKIPPED):
        for outcome in outcomes:
            if outcome.result == result:
                return outcome
    return Outcome(PASSED)


def _rank(
    module: Any,
    name: str,
    backend: str,
    rank: int,
    world_size: int,
    folder: str,
    writer: int,
) -> int:
    output = os.open(f"{folder}/output{rank}", os.O_CREAT | os.O_RDWR | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    result, reason = _outcome(module, name, backend, rank, world_size, folder)
    words = Path(f"{folder}/output{rank}").read_text(errors="replace") if result == FAILED else ""
    os.write(writer, pickle.dumps((result, reason[:1000], words[-4000:])))
    return 0


def _outcome(
    module: Any, name: str, backend: str, rank: int, world_size: int, folder: str
) -> tuple[str, str]:
    try:
        _run(module, name, backend, rank, world_size, folder)
    except unittest.SkipTest as skipped:
        return SKIPPED, str(skipped)
    except SystemExit as ended:
        reasons = [skip.message for skip in TEST_SKIPS.values() if skip.exit_code == ended.code]
        return (SKIPPED, reasons[0]) if reasons else (FAILED, f"exit status {ended.code}")
    except BaseException as error:
        traceback.print_exc()
        first_line = (str(error).splitlines() or [""])[0]
        return FAILED, f"{type(error).__name__}: {first_line}"
    return PASSED, ""


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
