"""``unisono.launch`` from Python: results, exceptions, repetition."""

from __future__ import annotations

import gc
import multiprocessing
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.launch.conftest import PROGRAMS
from tests.promises import promise
from tests.warm import processes

import unisono
from unisono.runtime.launch import api
from unisono.runtime.launch.forkserver import ForkServer, ServerPool, server_pool
from unisono.runtime.workers.context import context


class OddError(Exception):
    """Does not survive pickle: its __init__ wants more than its args."""

    def __init__(self, message: str, *, detail: int) -> None:
        super().__init__(message)
        self.detail = detail


def who_am_i(*args: Any) -> tuple[Any, ...]:
    return (unisono.world().rank, unisono.world().world_size, *args)


def fail_on(rank: int, error: BaseException) -> None:
    if unisono.world().rank == rank:
        raise error
    context().team().meet("test")


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 2, 3])
def test_values_come_back_in_rank_order(workers: int) -> None:
    values = unisono.launch(who_am_i, "x", workers=workers)
    assert values == [(rank, workers, "x") for rank in range(workers)]


@pytest.mark.slow
def test_workers_draw_what_the_caller_would_have_drawn() -> None:
    def draw() -> list[float]:
        return [random.random(), np.random.rand(), torch.rand(1).item()]

    random.seed(1)
    np.random.seed(2)
    torch.manual_seed(3)
    on_workers = unisono.launch(draw, workers=2)
    assert on_workers == [draw()] * 2


@pytest.mark.slow
def test_the_exception_of_the_worker_is_raised_from_its_traceback() -> None:
    with pytest.raises(KeyError, match="original") as raised:
        unisono.launch(fail_on, 1, KeyError("original"), workers=2)
    cause = raised.value.__cause__
    assert isinstance(cause, unisono.errors.WorkerError)
    assert (cause.rank, cause.exit_code) == (1, 1)
    first, *_, last = cause.remote_traceback.splitlines()
    assert first == "Traceback (most recent call last):"
    assert last == "KeyError: 'original'"
    assert "unisono/runtime/launch" not in cause.remote_traceback
    assert "in fail_on" in cause.remote_traceback.splitlines()[1]


@pytest.mark.slow
def test_exceptions_with_arguments_of_their_own_keep_their_fields() -> None:
    def fail() -> None:
        raise OddError("odd", detail=3)

    with pytest.raises(OddError, match="odd") as raised:
        unisono.launch(fail, workers=1)
    assert raised.value.detail == 3


@pytest.mark.slow
def test_an_exception_that_cannot_travel_becomes_a_worker_error() -> None:
    def fail() -> None:
        raise OSError(threading.Lock())

    with pytest.raises(
        unisono.errors.WorkerError, match=r"^OSError: .*\nIt was raised on worker 0 of 1:"
    ) as raised:
        unisono.launch(fail, workers=1)
    assert "OSError" in raised.value.remote_traceback


@pytest.mark.slow
def test_a_worker_that_exits_well_returns_nothing() -> None:
    def leave_or_return() -> str:
        if unisono.world().rank == 0:
            sys.exit()
        return "here"

    assert unisono.launch(leave_or_return, workers=2) == [None, "here"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("end", "exit_code", "words"),
    [
        (lambda: os.kill(os.getpid(), signal.SIGKILL), -9, "worker 1 of 3 was killed by SIGKILL"),
        (lambda: sys.exit(5), 5, "worker 1 of 3 left with exit status 5"),
        (lambda: os._exit(0), 0, "worker 1 of 3 left with exit status 0 in the middle of its"),
    ],
)
def test_a_worker_that_leaves_while_others_wait_is_named(
    end: Any, exit_code: int, words: str
) -> None:
    def leave() -> None:
        if unisono.world().rank == 1:
            end()
        context().team().meet("test")

    with pytest.raises(unisono.errors.WorkerError, match=words) as raised:
        unisono.launch(leave, workers=3)
    assert (raised.value.rank, raised.value.exit_code) == (1, exit_code)


@pytest.mark.slow
def test_launch_again_and_again_reuses_one_server() -> None:
    pids = {pid for _ in range(2) for pid in unisono.launch(os.getppid, workers=2)}
    assert len(pids) == 1


@pytest.mark.slow
def test_launch_works_from_threads_at_the_same_time(tmp_path: Path) -> None:
    def meet(mine: Path, others: Path) -> int:
        mine.touch()
        while not others.exists():
            time.sleep(0.001)
        return os.getppid()

    def launch(mine: str, others: str) -> int:
        return unisono.launch(meet, tmp_path / mine, tmp_path / others, workers=1)[0]

    servers: list[int] = []
    other = threading.Thread(target=lambda: servers.append(launch("a", "b")))
    other.start()
    here = launch("b", "a")
    other.join()
    assert servers != [here]
    # The kernel has ended the other one with its thread.
    assert unisono.launch(os.getppid, workers=1) == [here]


@pytest.mark.long
def test_variables_that_libraries_read_when_loaded_start_another_server(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before = unisono.launch(os.getppid, workers=1)
    monkeypatch.setenv("UNISONO_TEST", "harmless")
    assert unisono.launch(os.getppid, workers=1) == before
    assert unisono.launch(lambda: os.environ["UNISONO_TEST"], workers=1) == ["harmless"]
    monkeypatch.setenv("TORCH_TEST", "read when loaded")
    assert unisono.launch(os.getppid, workers=1) != before


@pytest.mark.slow
def test_a_worker_ends_without_taking_back_what_torch_has_made(tmp_path: Path) -> None:
    def finalizers(path: str) -> int:
        at_exit = [one for one in weakref.finalize._registry if one.atexit]
        weakref.finalize(unisono, Path(path).touch)
        return len(at_exit)

    file = tmp_path / "made at exit"
    assert unisono.launch(finalizers, str(file), workers=1) == [0]
    assert file.exists()  # the program's own do their work


@pytest.mark.long
def test_a_dead_server_is_replaced() -> None:
    (pid,) = unisono.launch(os.getppid, workers=1)
    os.kill(pid, signal.SIGKILL)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    server = server_pool().borrow(dict(os.environ))
    server_pool().give_back(server)
    assert server.pid != pid
    assert unisono.launch(who_am_i, workers=1) == [(0, 1)]


@pytest.mark.slow
def test_released_memory_is_given_back() -> None:
    def release_and_ask_again() -> list[int]:
        team = context().team()
        first = []
        for number in range(3):
            memory = team.memory(0, 4096)
            first.append(memory.flat(0, 1, torch.int64).item())
            team.meet("all have looked")
            memory.flat(0, 1, torch.int64).fill_(7)
            del memory
            gc.collect()
            team.memory(1 + number, 64)  # what is not used any more is told with the next request
            team.meet("all have let go")
        return first

    assert unisono.launch(release_and_ask_again, workers=2) == [[0, 0, 0]] * 2


@pytest.mark.slow
def test_descriptors_of_the_link_do_not_reach_subprocesses() -> None:
    def count() -> str:
        return subprocess.run(["ls", "/proc/self/fd"], capture_output=True, text=True).stdout

    assert unisono.launch(count, workers=1) == ["0\n1\n2\n3\n"]


@pytest.mark.slow
def test_the_server_forks_with_one_thread() -> None:
    def threads_of_server() -> int:
        return len(os.listdir(f"/proc/{os.getppid()}/task"))

    assert unisono.launch(threads_of_server, workers=1) == [1]


@pytest.mark.slow
def test_launch_inside_a_worker_is_refused() -> None:
    with pytest.raises(RuntimeError, match="call the function directly"):
        unisono.launch(lambda: unisono.launch(who_am_i, workers=1), workers=1)


SPAWNS = """
import multiprocessing, unisono

class Number(int): pass

def double(number): return Number(2 * number)

def work():
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.map_async(double, [Number(4)]).get(60)

if __name__ == "__main__":
    print(unisono.launch(work, workers=1))
"""


@pytest.mark.slow
@pytest.mark.parametrize("command", [["spawns.py"], ["-m", "spawns"]])
def test_what_a_worker_spawns_imports_the_program(command: list[str], tmp_path: Path) -> None:
    (tmp_path / "spawns.py").write_text(SPAWNS)
    done = processes.run([sys.executable, *command], cwd=tmp_path, timeout=100)
    assert (done.stdout, done.stderr) == ("[[8]]\n", "")


def test_launch_in_what_imports_the_program_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(multiprocessing.current_process(), "_inheriting", True, raising=False)
    with pytest.raises(RuntimeError, match='put it below `if __name__ == "__main__":`'):
        unisono.launch(who_am_i, workers=1)


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"workers": 0}, ValueError, "`workers` must be at least 1, but is 0"),
        ({"workers": "2"}, TypeError, "`workers` must be a whole number"),
        ({"workers": True}, TypeError, "`workers` must be a whole number, but is True"),
        ({"workers": 100_000}, ValueError, "at most .* but 100,000 are asked for: start"),
        ({"threads": -1}, ValueError, "`threads` must be at least 1, but is -1"),
        ({"threads": 2**31}, ValueError, "`threads` must be below 65537, but is 2147483648"),
        ({"stall_timeout_s": -1}, ValueError, "`stall_timeout_s` must be a number .* but is -1:"),
        ({"stall_timeout_s": "5"}, ValueError, "`stall_timeout_s` must be a number .* but is '5':"),
        ({"stall_timeout_s": True}, ValueError, "`stall_timeout_s` must be .* but is True:"),
        ({"stall_timeout_s": float("nan")}, ValueError, "`stall_timeout_s` must be .* but is nan:"),
        ({"replace": "no"}, TypeError, "`replace` must be True or False, but is 'no':"),
    ],
)
def test_wrong_numbers_are_refused(
    arguments: dict[str, Any], error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        unisono.launch(who_am_i, **arguments)


def test_a_server_is_closed_whatever_ends_a_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    borrowed: list[ForkServer] = []
    pool = ServerPool()  # that of other tests has one that has loaded torch

    def fail(server: ForkServer, *_: Any, **__: Any) -> None:
        borrowed.append(server)
        raise OSError("no descriptor is left")

    monkeypatch.setattr(api, "supervise", fail)
    monkeypatch.setattr(api, "server_pool", lambda: pool)
    with pytest.raises(OSError, match="no descriptor"):
        unisono.launch(who_am_i, workers=1)
    assert not Path(f"/proc/{borrowed[0].pid}").exists()


@pytest.mark.slow
def test_ctrl_c_cannot_reach_a_server_that_still_starts_and_can_reach_workers() -> None:
    server = ForkServer.start(dict(os.environ))
    status = Path(f"/proc/{server.pid}/status").read_text()
    server.kill()
    masks = re.findall(r"Sig(?:Blk|Ign):\s(\w+)", status)
    assert any(int(mask, 16) & 1 << (signal.SIGINT - 1) for mask in masks)
    assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, [])
    assert unisono.launch(signal.pthread_sigmask, signal.SIG_BLOCK, [], workers=1) == [set()]


@pytest.mark.slow
def test_an_interrupted_launch_can_be_repeated() -> None:
    done = processes.run([sys.executable, PROGRAMS / "interrupt.py"])
    assert (done.stdout, done.stderr, done.returncode) == ("interrupted\n1\n", "", 0)


def dies_without_training():
    assert unisono.load_weights
    os.kill(os.getpid(), signal.SIGKILL)


@promise("where-it-ends.1")
@pytest.mark.slow
def test_a_program_that_does_not_train_is_not_run_again():
    with pytest.raises(unisono.errors.WorkerError, match="had not made a `Run` or `Trainer` yet"):
        unisono.launch(dies_without_training, workers=1)


@pytest.mark.slow
def test_an_alarm_of_the_callers_own_ends_no_job():
    def alarm_the_caller(pid):
        os.kill(pid, signal.SIGALRM)
        time.sleep(0.2)
        return "done"

    heard = []
    before = signal.signal(signal.SIGALRM, lambda signum, frame: heard.append(signum))
    try:
        assert unisono.launch(alarm_the_caller, os.getpid(), workers=1) == ["done"]
    finally:
        signal.signal(signal.SIGALRM, before)
    assert heard == [signal.SIGALRM]
