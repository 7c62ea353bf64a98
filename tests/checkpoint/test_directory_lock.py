"""One job at a time in a run directory, whatever becomes of it."""

import contextlib
import fcntl
import os
import signal
import subprocess
import sys
import threading
import time
from unittest.mock import Mock

import pytest
import torch
from tests.descriptors import is_locked
from tests.promises import promise
from tests.threads import in_threads
from torch.utils.data import TensorDataset

import unisono
from unisono.errors import CheckpointError
from unisono.runtime.checkpoint import run_directory
from unisono.runtime.checkpoint.run_directory import HeldElsewhereError, lock_directory
from unisono.training import checkpoints


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "a run"


@pytest.fixture
def in_use(folder):
    """Hold the folder as another job would, without telling this process of it."""
    folder.mkdir()
    fd = os.open(folder, os.O_RDONLY)
    fcntl.flock(fd, fcntl.LOCK_EX)
    yield
    os.close(fd)


def test_within_a_process_all_claims_are_one_and_end_with_the_last(folder):
    first, second = lock_directory(folder), lock_directory(folder)
    assert first is second is not None
    assert is_locked(folder)
    del first
    assert is_locked(folder)
    del second
    assert not is_locked(folder)
    assert [path.name for path in folder.iterdir()] == [".lock"]


def test_a_forked_process_does_not_have_what_its_parent_holds(folder):
    held = lock_directory(folder)
    child = os.fork()
    if child == 0:
        try:
            lock_directory(folder)
        except CheckpointError:
            os._exit(7)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    assert held is not None
    assert is_locked(folder)


HOLD = """
import os, sys
from pathlib import Path
from unisono.runtime.checkpoint.run_directory import lock_directory
held = lock_directory(Path(sys.argv[1]))
if os.fork() == 0:
    sys.stdin.read()  # a loader process, say, that outlives its parent
    os._exit(0)
print("held", flush=True)
os.wait()
"""


@pytest.mark.slow
def test_another_process_is_named_and_its_end_is_the_end_of_its_claim(folder):
    command = [sys.executable, "-c", HOLD, str(folder)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, **pipes) as other:
        assert other.stdout.readline() == b"held\n"
        with pytest.raises(CheckpointError, match=rf"is in use by process {other.pid}: wait"):
            lock_directory(folder)
        other.send_signal(signal.SIGKILL)
        other.wait(60)
        assert lock_directory(folder) is not None


SLOW_FORK = """
import fcntl, os, sys, time
fd = os.open(sys.argv[1], os.O_RDONLY)
fcntl.flock(fd, fcntl.LOCK_EX)
if os.fork() == 0:
    time.sleep(0.5)  # until it lets go
    os._exit(0)
print("held", flush=True)
os.wait()
"""


@pytest.mark.slow
def test_a_fork_that_lets_go_later_keeps_nobody_out(folder):
    folder.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-c", SLOW_FORK, str(folder)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as other:
        assert other.stdout.readline() == b"held\n"
        other.send_signal(signal.SIGKILL)
        other.wait(60)
        assert lock_directory(folder) is not None


def test_a_lock_that_is_released_while_its_holder_is_sought_is_taken(folder, monkeypatch):
    folder.mkdir(parents=True, exist_ok=True)
    other = os.open(folder, os.O_RDONLY)
    fcntl.flock(other, fcntl.LOCK_EX)
    monkeypatch.setattr(run_directory, "holder_of", lambda directory: os.close(other))
    assert lock_directory(folder) is not None


@pytest.fixture
def held_elsewhere(folder):
    """Hold a folder as a job on another host does on NFS, where that of folders is not seen."""
    folder.mkdir()
    with (folder / ".lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield file


def test_a_job_on_another_host_keeps_others_out(folder, held_elsewhere):
    with pytest.raises(HeldElsewhereError, match="is in use on another host: wait until"):
        lock_directory(folder)
    assert not is_locked(folder)
    held_elsewhere.close()
    assert lock_directory(folder) is not None


def test_a_run_waits_until_the_lock_of_a_lost_host_is_dropped(
    folder, held_elsewhere, monkeypatch, capsys
):
    clock = Mock(wraps=time, sleep=lambda seconds: held_elsewhere.close())
    monkeypatch.setattr(checkpoints, "time", clock)
    assert train(folder) == 2
    assert "is in use on another host: waiting up to 120 s" in capsys.readouterr().out


def test_a_link_in_place_of_the_file_that_is_locked_is_refused(folder, tmp_path):
    folder.mkdir()
    (folder / ".lock").symlink_to(tmp_path / "outside")
    with pytest.raises(CheckpointError, match="must be a plain file with no other name, but is a"):
        lock_directory(folder)
    assert not (tmp_path / "outside").exists()


@pytest.mark.parametrize("place", ["file/run", "/proc/run"])
def test_where_nothing_can_be_made_nobody_is_kept_out(tmp_path, place):
    (tmp_path / "file").touch()
    assert lock_directory(tmp_path / place) is None


def train(directory):
    model = torch.nn.Linear(4, 2)
    data = TensorDataset(torch.ones(8, 4))
    loss = lambda model, batch: model(batch[0]).square().mean()  # noqa: E731
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trainer = unisono.Trainer(model, optimizer, loss, shards=2, directory=directory)
    trainer.fit(data, batch_size=4, epochs=1)
    return trainer.run.position.step


@promise("nothing-lost.11")
@pytest.mark.slow
@pytest.mark.parametrize("workers", [None, 2])
def test_nobody_begins_in_anothers_directory(folder, in_use, workers):
    with pytest.raises(CheckpointError, match="must belong to one job at a time"):
        train(folder) if workers is None else unisono.launch(train, folder, workers=workers)
    assert list(folder.iterdir()) == []


@pytest.mark.slow
def test_a_launched_job_has_its_directory_to_its_end_and_no_longer(folder):
    def train_seeded():
        torch.manual_seed(0)  # another trainer that begins with the same weights
        return train(folder)

    def train_and_look():
        return train_seeded(), train_seeded(), is_locked(folder)

    assert unisono.launch(train_and_look, workers=2) == [(2, 2, True)] * 2
    assert not is_locked(folder)
    assert train_seeded() == 2


def test_threads_that_lock_a_directory_at_once_get_one_lock(tmp_path, monkeypatch):
    flock, both = fcntl.flock, threading.Barrier(2)

    def late(*arguments):
        with contextlib.suppress(threading.BrokenBarrierError):
            both.wait(0.2)
        flock(*arguments)

    monkeypatch.setattr(fcntl, "flock", late)
    first, second = in_threads(2, lambda rank: lock_directory(tmp_path))
    assert first is second is not None
