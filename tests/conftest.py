"""Whatever a test starts ends with it: processes, threads, files in shared memory, variables."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator

import psutil
import pytest
from hypothesis import settings
from tests import huge_pages
from tests.accelerator.fixture import (  # noqa: F401
    accelerator,
    build,
    optimizers_are_imported,
    pytest_pyfunc_call,
)
from tests.promises import Results

from unisono.runtime.launch import forkserver
from unisono.runtime.signals import ENDING_SIGNALS
from unisono.runtime.workers.control_block import ControlBlock
from unisono.runtime.workers.interrupts import interrupts
from unisono.runtime.world import read_in_program

# Tests share cores with workers, so no single example has to be quick.
settings.register_profile("unisono", deadline=None)
settings.load_profile("unisono")

# A worker imports the module of its test, and that pytest: once in the server will do for all, as
# for what a worker's run and its progress bar import late.
_LATE = "rich._emoji_codes, unisono.callbacks, unisono.runtime.workers.external"
_BEFORE, _FROM, _MAIN = forkserver._START.partition("from unisono.runtime.launch.forkserver")
forkserver._START = (
    f"{_BEFORE}import hypothesis, pytest, runpy, {_LATE}; "
    "from unisono.runtime.launch import forkserver; "
    f"load, pages = forkserver.load, runpy.run_path({huge_pages.__file__!r}); "
    f"forkserver.load = lambda: (load(), pages['collapse']()); {_FROM}{_MAIN}"
)

# Nothing here loads CUDA, so a server that has loaded torch may serve whatever GPUs are named.
forkserver._READ_AT_LOAD = tuple(one for one in forkserver._READ_AT_LOAD if one != "CUDA_")

MANY = 500  # tests whose forks together cost more than the second that large pages take
LARGE = {"torchmetrics", "scipy", "sklearn", "transformers", "playwright", "nbformat"}
SETTLE_S = 20.0  # a worker's exit is told before the kernel has buried it
# pytest's own, and torch's empty folder names
HARMLESS_VARIABLES = {"PYTEST_CURRENT_TEST", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"}


_kept: set[int] = set()  # by number, since psutil takes longer than most tests


def _workers_and_others() -> set[psutil.Process]:
    """Find every process below this one but idle ones that have loaded torch, kept on purpose."""
    found, below = set(), set(_below(os.getpid()))
    _kept.intersection_update(below)
    for pid in below - _kept:
        with contextlib.suppress(psutil.NoSuchProcess):
            process = psutil.Process(pid)
            if _is_kept(process):
                _kept.add(pid)
            else:
                found.add(process)
    return found


def _below(pid: int) -> Iterator[int]:
    """Walk down from a process; psutil would look at every process of the machine each time."""
    with contextlib.suppress(OSError):
        for thread in os.listdir(f"/proc/{pid}/task"):
            with (
                contextlib.suppress(OSError),
                open(f"/proc/{pid}/task/{thread}/children") as children,
            ):
                for child in map(int, children.read().split()):
                    yield child
                    yield from _below(child)


def _is_kept(process: psutil.Process) -> bool:
    is_direct = process.ppid() == os.getpid()
    command = " ".join(process.cmdline())
    return is_direct and ("unisono.runtime.launch.forkserver" in command or "tests.warm" in command)


def _in_shared_memory() -> set[str]:
    return set(os.listdir("/dev/shm"))


def _variables() -> dict[str, str]:
    return {k: v for k, v in os.environ.items() if k not in HARMLESS_VARIABLES}


# What is imported stays: looking for garbage in it again and again takes seconds.
gc.disable()


def pytest_configure(config: pytest.Config) -> None:
    """Compute on the CPU also where there are GPUs, and hear Ctrl-C also in the background."""
    if not hasattr(config, "workerinput"):  # workers of pytest-xdist send it their reports
        config.pluginmanager.register(Results(config))
    if config.option.markexpr != "gpu":
        os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")
    if len(os.sched_getaffinity(0)) >= 4:  # a program that nobody launched says that it uses one
        os.environ.setdefault("UNISONO_THREADS", "1")
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        # So a shell starts what runs in its background; Ctrl-C is what many tests are about.
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_finish(session: pytest.Session) -> None:
    """Look for garbage in what tests make alone, and compute small things without a pool."""
    build(session)
    _check_names(session)
    _check_libraries(session)
    gc.freeze()
    gc.enable()
    if torch := sys.modules.get("torch"):
        torch.set_num_threads(1)  # as runs do; two beside other processes take thirty times as long
    if len(session.items) > MANY and not session.config.option.collectonly:
        huge_pages.collapse()


def _check_names(session: pytest.Session) -> None:
    """Refuse names that no other process has for the same test: two divide the tests by them."""
    for item in session.items:
        if " at 0x" in item.nodeid:
            raise pytest.UsageError(
                f"the name of a test holds an address, so give `ids`: {item.nodeid}"
            )


def _check_libraries(session: pytest.Session) -> None:
    """Refuse what every process of the tests would load, and every fork hold, for a few tests."""
    if len(session.items) > MANY and (loaded := LARGE.intersection(sys.modules)):
        raise pytest.UsageError(
            f"import where it is used, not at the top: {', '.join(sorted(loaded))}"
        )


@pytest.fixture
def control_of() -> Iterator[Callable[[int], ControlBlock]]:
    """Give a function that makes the control block of so many workers, which may be threads."""
    pages = []

    def make(world_size: int) -> ControlBlock:
        pages.append(ControlBlock.create(world_size))
        return pages[-1]

    yield make
    for control in pages:
        control.close()


@pytest.fixture(autouse=True)
def nothing_is_left_behind() -> Iterator[None]:
    processes, threads = _workers_and_others(), set(threading.enumerate())
    files, variables = _in_shared_memory(), _variables()
    read_in_program.clear()  # by an earlier test
    yield
    interrupts()._put_back(ENDING_SIGNALS)  # which stay from a program's first loop to its end
    deadline = time.monotonic() + SETTLE_S
    # Others, that run tests at the same time, have files there for moments: none of them stays.
    new_files = _in_shared_memory() - files
    while time.monotonic() < deadline:
        left = (
            _workers_and_others() - processes,
            {thread for thread in threading.enumerate() if thread.is_alive()} - threads,
            new_files & _in_shared_memory(),
        )
        if not any(left):
            break
        time.sleep(0.01)
    assert not any(left), f"left behind: processes {left[0]}, threads {left[1]}, files {left[2]}"
    assert _variables() == variables, "the environment was changed"
