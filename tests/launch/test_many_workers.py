"""However many workers are asked for, launcher and fork server never wait for each other."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import time
from types import SimpleNamespace

import psutil
import pytest
from tests.chaos.jobs import gone_within
from tests.launch.conftest import COMMAND
from tests.warm import processes

from unisono.runtime.launch.job import SCRIPT, Job
from unisono.runtime.launch.placement import Machine, crowded, place_workers
from unisono.runtime.launch.report import failure_message
from unisono.runtime.launch.supervise import _ASKED_AT_MOST, _Supervision
from unisono.runtime.workers.channel import Channel
from unisono.runtime.workers.launcher_messages import Forked, ForkWorker, WorkerExited

MANY = 700


def job_of(num_workers: int) -> Job:
    return Job(
        kind=SCRIPT,
        target="train.py",
        environ={},
        num_workers=num_workers,
        threads=1,
        restarts=3,
        replaces=True,
        stall_timeout_s=60.0,
        backend="gloo",
    )


def test_the_server_is_asked_for_few_workers_before_it_answers() -> None:
    ours, theirs = Channel.pair()
    job = job_of(MANY)
    supervision = _Supervision(SimpleNamespace(channel=ours), job, None)  # type: ignore[arg-type]
    try:
        supervision._start_next()
        asked = _asked(theirs)
        assert asked == list(range(_ASKED_AT_MOST))
        for rank in asked[:3]:
            theirs.send(Forked(rank, os.getpid()))
        supervision._read_server()
        assert _asked(theirs) == [_ASKED_AT_MOST + number for number in range(3)]
    finally:
        supervision.close()
        ours.close()
        theirs.close()


def test_a_worker_that_cannot_be_started_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = Channel.pair()
    server = SimpleNamespace(channel=ours, signal=lambda *_: None, kill=lambda: None)
    supervision = _Supervision(server, job_of(2), None)  # type: ignore[arg-type]
    dup = os.dup

    def refuse(fd: int) -> int:
        if _asked(theirs) == [0]:
            theirs.send(Forked(0, os.getpid()))
            theirs.send(WorkerExited(0, 0))
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return dup(fd)

    monkeypatch.setattr(os, "dup", refuse)
    try:
        supervision.watch()
        assert "worker 1 of 2 could not be started (" in failure_message(supervision.state, 2)
        assert "OSError: [Errno 24] Too many open" in failure_message(supervision.state, 2)
    finally:
        supervision.close()
        ours.close()
        theirs.close()


def _asked(channel: Channel) -> list[int]:
    ranks = []
    for message in channel.receive_ready():
        assert isinstance(message, ForkWorker)
        ranks.append(message.rank)
        for fd in message.fds:
            os.close(fd)
    return ranks


def test_many_workers_on_few_cores_get_a_line() -> None:
    assert crowded(16, 2) == ""
    assert crowded(17, 2).startswith("17 workers take turns on 2 cores, which is slow: start about")


def test_more_workers_than_open_files_are_refused() -> None:
    assert place_workers(800, None, {}, Machine(2, (), 1024)).num_workers == 800
    with pytest.raises(ValueError, match=r"enter `ulimit -n 1127` before"):
        place_workers(999, None, {}, Machine(2, (), 1024))


@pytest.mark.long
@pytest.mark.timeout(600)
def test_seven_hundred_workers_start_and_end(tmp_path) -> None:
    script = tmp_path / "hi.py"
    script.write_text("import os\nopen(os.environ['RANK'], 'w').close()\n")
    command = [*COMMAND, "-n", str(MANY), script]
    done = processes.run(command, cwd=tmp_path, timeout=590)
    assert (done.returncode, len(list(tmp_path.iterdir()))) == (0, MANY + 1), done.stderr
    assert "700 workers take turns" in done.stderr


@pytest.mark.long
@pytest.mark.timeout(600)
def test_a_signal_ends_seven_hundred_workers_while_they_start(tmp_path) -> None:
    script = tmp_path / "stays.py"
    script.write_text("import os, time\nopen(os.environ['RANK'], 'w').close()\ntime.sleep(600)\n")
    command = [*COMMAND, "-n", str(MANY), script]
    with processes.start(command, cwd=tmp_path, stderr=subprocess.PIPE, text=True) as launcher:
        while not (tmp_path / "0").exists():
            assert launcher.poll() is None
            time.sleep(0.05)
        started = psutil.Process(launcher.pid).children(recursive=True)
        launcher.send_signal(signal.SIGTERM)
        _, said = launcher.communicate(timeout=300)
    assert launcher.returncode == 128 + signal.SIGTERM, said
    assert gone_within(started, 60.0) == []
    assert len(list(tmp_path.iterdir())) < MANY  # it was in the midst of starting them
