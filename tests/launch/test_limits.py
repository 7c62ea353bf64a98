"""What the shell's limits refuse is told in a sentence that names the limit."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from unisono.errors import WorkerError
from unisono.runtime.launch import forkserver
from unisono.runtime.launch.policy import JobState, WorkerFailure
from unisono.runtime.launch.report import failure_message
from unisono.runtime.limits import limits_behind
from unisono.runtime.workers.launcher_messages import ProgramFailed

PROCESSES = "`ulimit -u` must allow what a run needs, but limits the processes and threads"
FILES = "`ulimit -n` must allow what a run needs, but limits the files a process may have open to"
MEMORY = "`ulimit -v` must allow what a run needs, but limits the memory a process may reserve to"


@pytest.fixture
def limited(monkeypatch: pytest.MonkeyPatch) -> None:
    least = {
        resource.RLIMIT_NPROC: 40,
        resource.RLIMIT_NOFILE: 50,
        resource.RLIMIT_AS: 300 << 20,
    }
    monkeypatch.setattr(resource, "getrlimit", lambda which: (least[which], least[which]))


@pytest.mark.parametrize(
    ("said", "sentence"),
    [
        ("BlockingIOError: [Errno 11] Resource temporarily unavailable", f"{PROCESSES} a user may"),
        ("RuntimeError: can't start new thread", PROCESSES),
        ("OSError: [Errno 24] Too many open files", f"{FILES} 50: raise it"),
        ("OSError: [Errno 12] Cannot allocate memory", f"{MEMORY} 300 MiB: raise it"),
        ("ImportError: libtorch_cpu.so: failed to map segment from shared object", MEMORY),
        ("MemoryError", MEMORY),
        ("RuntimeError: [enforce fail] DefaultCPUAllocator: can't allocate memory", MEMORY),
        ("OSError: [Errno 28] No space left on device", ""),
        ("BlockingIOError: [Errno 11] write could not complete without blocking", ""),
    ],
)
def test_a_limit_is_named_if_there_is_one(
    said: str, sentence: str, monkeypatch: pytest.MonkeyPatch, limited: None
) -> None:
    (found,) = list(limits_behind(said)) or [""]
    assert found.startswith(sentence)
    assert bool(found) == bool(sentence)
    none = resource.RLIM_INFINITY
    monkeypatch.setattr(resource, "getrlimit", lambda which: (none, none))
    assert not list(limits_behind(said))


def test_a_worker_that_gets_no_memory_is_told_of_the_limit(limited: None) -> None:
    summary = "OSError: [Errno 12] Cannot allocate memory"
    said = ProgramFailed(1, summary, f"Traceback\n{summary}", None, False, b"")
    state = JobState(frozenset(), failures=(WorkerFailure(0, 1, said),))
    assert f"{summary}\n{MEMORY} 300 MiB" in failure_message(state, 2)
    lost = JobState(frozenset(), failures=(WorkerFailure(None, -6, said),))
    assert MEMORY in failure_message(lost, 2)
    told = JobState(frozenset(), failures=(WorkerFailure(None, os.EX_OSERR, said),))
    assert MEMORY not in failure_message(told, 2)


def test_a_launch_that_may_start_no_process_names_the_limit(
    monkeypatch: pytest.MonkeyPatch, limited: None
) -> None:
    def refuse(*args: object, **options: object) -> None:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    monkeypatch.setattr(subprocess, "Popen", refuse)
    with pytest.raises(WorkerError, match="the system must let a process for the workers start"):
        forkserver.ForkServer.start({})


@pytest.mark.slow
def test_run_says_in_one_sentence_that_torch_finds_no_room(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.touch()
    command = f"ulimit -v 300000; exec {sys.executable} -m unisono run -n 2 {script}"
    done = subprocess.run(["sh", "-c", command], capture_output=True, text=True)
    assert f"failed to map segment from shared object. {MEMORY} 293 MiB" in done.stderr
    assert "Traceback" not in done.stderr
    assert done.returncode == 1
