"""Workers that stand still, programs that fail, launchers that are asked to end or are killed.

Whatever happens is told in words, nothing is left running, and whoever starts again with the same
run directory ends with the bits of the undisturbed run.
"""

from __future__ import annotations

import functools
import os
import re
import signal
import time
from dataclasses import replace
from pathlib import Path

import pytest
from tests.chaos import driver
from tests.chaos.jobs import Job, gone_within
from tests.chaos.phases import read_phase
from tests.chaos.training import GATE_STEP, NUM_STEPS, Options, train
from tests.promises import promise

import unisono
from unisono.runtime import signals
from unisono.runtime.checkpoint.run_directory import RunDirectory

pytestmark = pytest.mark.slow

HOLD = (9, 15, 20)
FOR_EVER_MS = 60_000.0  # longer than any test waits


@functools.cache
def undisturbed() -> dict[str, object]:
    return train(Options())


def furthest(job: Job, phases: Path) -> int:
    """Tell the last step in which a worker computes, or has."""
    seen = [read_phase(phases, one.pid) for one in [*job.workers(), job.process]]
    return max(step for phase, step in [*seen, ("", -1)] if phase != "snapshot")


@pytest.fixture
def started(tmp_path):
    """Start jobs, each of which ends with the test."""
    jobs = []

    def start(options=None, *, step=None, **more):
        """Start one; with `step`, return when a worker has come to it."""
        phases = tmp_path / f"phases-{len(jobs)}"
        phases.mkdir()
        options = replace(options or Options(), phases=str(phases))
        jobs.append(Job(tmp_path, options, **more))
        if step is not None:
            jobs[-1].wait_until(lambda: furthest(jobs[-1], phases) >= step, f"step {step}")
        return jobs[-1]

    yield start
    for job in jobs:
        job.end()


@pytest.fixture
def in_directory(tmp_path):
    """Give options of a run that keeps checkpoints and is slow enough to be met at work."""

    def options(**more):
        return Options(directory=str(tmp_path / "run"), **{"pace_ms": 10.0, **more})

    return options


def steps_kept(tmp_path):
    entries = RunDirectory(tmp_path / "run").entries()
    assert not any(entry.trouble for entry in entries)
    return [entry.step for entry in entries]


def check_goes_on(started, options, *, resumed=None, **more):
    """Start again without disturbance; `resumed`: at which step."""
    job = started(replace(options, pace_ms=0.0), **{"workers": 2, **more})
    assert job.wait() == 0, job.err
    assert "resuming from checkpoint" in job.err
    assert resumed is None or f"checkpoint step-{resumed:012} " in job.err
    assert job.results
    assert all(result == undisturbed() for result in job.results)


def explanations(job):
    return re.findall(r"^unisono: (worker \d of \d .*)", job.err, re.MULTILINE)


# Workers that stand still.


@promise("nothing-lost.4")
@pytest.mark.parametrize(
    "fault",
    [
        pytest.param("stop:rank=1,step=8", marks=pytest.mark.long),
        "stop:rank=0,step=8,at=update",
        pytest.param("stop:rank=2,step=8,at=shard", marks=pytest.mark.long),
    ],
)
def test_a_stopped_worker_is_ended_and_made_up_for(monkeypatch, capfd, fault):
    monkeypatch.setenv("UNISONO_FAULTS", fault)
    options = Options(hold=HOLD)
    results = unisono.launch(train, options, workers=3, stall_timeout_s=1, restarts=9)
    said = capfd.readouterr().err
    assert results == [undisturbed()] * 3
    told = re.search(
        r"worker (\d) \(pid \d+\) must move while others wait for it.* step 8: (.*)", said
    )
    assert told is not None
    assert told[1] == fault[10]
    assert told[2].startswith("a signal has stopped it (SIGSTOP, or a debugger). It is ended")
    how = r"was ended, as it stood still for \d s in step 8; .* replacement is starting"
    assert re.search(rf"worker {told[1]} \(pid \d+\) {how}", said)
    assert "SIGKILL" not in said


def test_a_replacement_that_stands_still_is_replaced(monkeypatch, capfd):
    monkeypatch.setenv("UNISONO_FAULTS", "kill:rank=1,step=7; stop:rank=1,at=join")
    results = unisono.launch(train, Options(hold=HOLD), workers=3, stall_timeout_s=1, restarts=9)
    assert results == [undisturbed()] * 3
    assert "a signal has stopped it" in capfd.readouterr().err


# Programs that fail, which no replacement would mend.


def train_with_a_loader_that_dies():
    """Train, and read by a loader process of which one is killed on one worker."""
    import torch
    from tests.chaos.training import BATCH_SIZE, make, samples

    model, optimizer = make("adam")
    run = unisono.Run(model, optimizer, shards=5)
    for step in run.steps(samples(110, 1), batch_size=BATCH_SIZE, epochs=1):
        with step:
            if unisono.world().rank == 1 and step.number == 3:
                list(torch.utils.data.DataLoader(Deadly(), num_workers=1))
            for inputs, labels in step.shards:
                step.backward(torch.nn.functional.cross_entropy(model(inputs), labels))


class Deadly:
    def __len__(self):
        return 3

    def __getitem__(self, index):
        os.kill(os.getpid(), signal.SIGKILL)


def test_a_loader_process_that_dies_is_an_exception_of_the_program(capfd):
    with pytest.raises(RuntimeError, match=r"DataLoader worker .* (exited|killed)"):
        unisono.launch(train_with_a_loader_that_dies, workers=3)
    assert "replacement" not in capfd.readouterr().err


# Losses that are not made up for.


@promise("nothing-lost.6")
def test_more_losses_than_allowed_end_the_run_with_an_explanation(started, tmp_path, in_directory):
    faults = "kill:rank=1,step=8; kill:rank=0,step=9; segv:rank=2,step=21"
    options = in_directory(pace_ms=0.0, hold=HOLD)
    job = started(options, workers=3, flags=("--restarts", 2), faults=faults)
    assert job.wait() == 128 + signal.SIGSEGV
    (told,) = explanations(job)
    assert "worker 2 of 3 was killed by SIGSEGV" in told
    assert (
        "3 workers were lost within 60 s, more than `--restarts` or `restarts` (2) allows" in told
    )
    assert 12 <= steps_kept(tmp_path)[0] <= 21  # the newest snapshot
    check_goes_on(started, options)


@promise("nothing-lost.7")
def test_the_last_worker_without_a_replacement_ends_the_run(started):
    faults = "kill:rank=1,step=8; kill:rank=0,step=12; kill:rank=2,step=15,at=update"
    job = started(workers=3, flags=("--no-replace",), faults=faults)
    assert job.wait() == 128 + signal.SIGKILL
    (told,) = explanations(job)
    assert "it was the last worker, and `--no-replace` or `replace=False` allows no other" in told


def test_a_lost_fork_server_is_told_and_nothing_is_left(started, tmp_path, in_directory):
    options = in_directory(every=2)
    job = started(options, step=7, workers=3)
    processes = job.processes()
    job.server.kill()
    assert job.wait() not in (0, None)
    assert "the process that starts the workers must live as long as they do" in job.err
    assert not gone_within(processes, 30)
    assert steps_kept(tmp_path)
    check_goes_on(started, options)


# Asked to end.

INTERRUPTS = [(signal.SIGINT, "by Ctrl-C"), (signal.SIGTERM, "by SIGTERM")]
INTERRUPTS += [(signal.SIGUSR1, "by SIGUSR1")]


def interrupt(job, signum):
    """Send a signal as a terminal does Ctrl-C: to everybody; SIGTERM goes to the launcher."""
    if signum == signal.SIGINT:
        os.killpg(job.process.pid, signum)
    else:
        job.process.send_signal(signum)


@promise("nothing-lost.10")
@pytest.mark.parametrize(("signum", "words"), INTERRUPTS)
def test_asked_once_the_step_is_finished_and_kept(started, tmp_path, in_directory, signum, words):
    options = in_directory()
    job = started(options, step=4, workers=3)
    processes = job.processes()
    interrupt(job, signum)
    assert job.wait() == 128 + signum
    assert job.err.count("finishing the step, then writing a checkpoint") == 1
    assert f"interrupted {words}; all 3 workers were ended." in job.err
    assert "Traceback" not in job.err
    assert not gone_within(processes, 30)
    step = max(steps_kept(tmp_path))  # where the step was slow, there is one before it
    assert 4 < step < NUM_STEPS
    assert re.search(rf"unisono: step {step} is on the disk, in .*: start the program aga", job.err)
    check_goes_on(started, options)


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGUSR2])
def test_every_process_is_told_and_the_step_is_kept(started, tmp_path, in_directory, signum):
    """Slurm signals all processes of a job, the fork server and workers, too."""
    options = in_directory()
    job = started(options, step=4, workers=2)
    processes = job.processes()
    assert len(processes) >= 4
    for process in reversed(processes):
        process.send_signal(signum)
    assert job.wait() == 128 + signum
    assert not gone_within(processes, 30)
    step = max(steps_kept(tmp_path))  # an earlier call of `fit` may have ended
    assert 4 < step < NUM_STEPS
    assert "is starting" not in job.err  # no worker was lost
    check_goes_on(started, options)


def test_a_worker_that_is_told_alone_is_replaced(started, tmp_path, in_directory):
    job = started(in_directory(), step=4, workers=2)
    job.workers()[1].terminate()
    assert job.wait() == 0, job.err
    assert "was killed by SIGTERM" in job.err
    assert all(result == undisturbed() for result in job.results)


def test_asked_while_a_worker_is_lost(started, tmp_path, in_directory):
    options = in_directory()
    job = started(options, step=4, workers=3)
    job.workers()[0].kill()
    interrupt(job, signal.SIGINT)
    assert job.wait() == 130
    assert len(steps_kept(tmp_path)) == 1
    check_goes_on(started, options)


@pytest.fixture
def asked_in_a_long_step(started, tmp_path, in_directory):
    """Give a notice in a step that waits for a file, once there are checkpoints 6 and 8."""
    options = in_directory(every=8, keep=1, gate=str(tmp_path / "gate"), pace_ms=60.0)
    options = replace(options, slow_every=8)  # so that a snapshot follows
    job = started(options, step=GATE_STEP, workers=2)
    assert steps_kept(tmp_path) == [8, 6]  # one call has ended with 6
    interrupt(job, signal.SIGTERM)
    job.wait_until(lambda: max(steps_kept(tmp_path)) > 8, "the newest snapshot is kept")
    newest, *older = steps_kept(tmp_path)
    assert newest <= GATE_STEP
    assert older == [8, 6]  # another host may have no newer one yet
    return job, options, newest


def test_a_kill_in_a_long_step_costs_what_came_after_the_newest_snapshot(
    started, asked_in_a_long_step
):
    job, options, newest = asked_in_a_long_step
    job.end()  # by SIGKILL, as the time that was left is over
    check_goes_on(started, replace(options, gate=""), resumed=newest)


def test_a_long_step_that_ends_in_time_is_kept(started, tmp_path, asked_in_a_long_step):
    job, options, _ = asked_in_a_long_step
    Path(options.gate).touch()
    assert job.wait() == 128 + signal.SIGTERM
    assert steps_kept(tmp_path) == [GATE_STEP + 1, 6]
    check_goes_on(started, options, resumed=GATE_STEP + 1)


@promise("nothing-lost.10")
def test_asked_twice_it_ends_at_once(started, tmp_path, in_directory):
    job = started(in_directory(pace_ms=FOR_EVER_MS), step=0, workers=2)
    processes = job.processes()
    interrupt(job, signal.SIGINT)
    job.wait_for("finishing the step")
    time.sleep(signals.ONE_SIGNAL_S)
    interrupt(job, signal.SIGINT)
    assert job.wait(60) == 128 + signal.SIGINT
    assert not gone_within(processes, 30)
    assert steps_kept(tmp_path) == []


def test_without_a_directory_it_ends_at_once(started):
    job = started(Options(pace_ms=FOR_EVER_MS), step=0, workers=2)
    processes = job.processes()
    interrupt(job, signal.SIGTERM)
    assert job.wait(60) == 128 + signal.SIGTERM
    assert "finishing the step" not in job.err
    assert not gone_within(processes, 30)


@pytest.mark.parametrize(
    ("signum", "status"), [(signal.SIGINT, -signal.SIGINT), (signal.SIGTERM, 143)]
)
def test_plain_python_finishes_the_step_too(started, tmp_path, in_directory, signum, status):
    options = in_directory()
    job = started(options, step=4)
    job.process.send_signal(signum)
    assert job.wait() == status
    assert "finishing the step, then writing a checkpoint" in job.err
    (step,) = steps_kept(tmp_path)
    assert 4 < step < NUM_STEPS
    assert f"step {step} is on the disk, in " in job.err.splitlines()[-1]
    check_goes_on(started, options)


# Disks and launchers.


@promise("nothing-lost.13")
def test_a_full_disk_is_told_and_the_next_checkpoint_is_there(started, tmp_path, in_directory):
    options = in_directory(every=8, pace_ms=0.0)
    job = started(options, workers=2, faults="disk-full:checkpoint=4")
    assert job.wait() == 0, job.err
    (told,) = re.findall("no checkpoint: .*", job.err)
    assert "No space left on device; training continues, and the next one is tried" in told
    assert steps_kept(tmp_path) == [24, 12, 8, 6]  # after three calls of `fit`, and every 8
    assert all(result == undisturbed() for result in job.results)


def test_a_run_goes_on_on_other_numbers_of_workers_in_spite_of_losses(monkeypatch, tmp_path):
    for epochs, workers in ((1, 3), (2, 1), (3, 2), (4, 4)):
        monkeypatch.setenv("UNISONO_FAULTS", f"kill:rank=0,step={6 * epochs - 4},at=update")
        options = Options(directory=str(tmp_path), every=2, epochs=epochs)
        results = unisono.launch(train, options, workers=workers)
        assert results == [results[0]] * workers
    assert results[0] == undisturbed()


@pytest.mark.long
def test_a_launcher_killed_again_and_again_loses_nothing():
    outcome = driver.kill_launchers(seed=1, num_kills=4, num_workers=2)
    assert outcome.is_equal, outcome.trouble


# Programs that fail.


@promise("nothing-lost.8")
@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("raise:rank=1,step=8", "asked for by UNISONO_FAULTS\nIt was raised on worker 1 of 2"),
        ("exit:rank=1,step=8", "worker 1 of 2 left with exit status 0 in the middle of its progr"),
    ],
)
def test_a_worker_that_fails_ends_the_run_after_a_last_checkpoint(
    started, tmp_path, in_directory, fault, words
):
    options = in_directory(pace_ms=0.0)
    job = started(options, workers=2, faults=fault)
    assert job.wait() == 1
    assert words in job.err
    assert job.err.count("Traceback (most recent call last)") == 1
    assert 6 <= steps_kept(tmp_path)[0] <= 8  # the newest snapshot
    check_goes_on(started, options)
