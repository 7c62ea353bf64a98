"""Under other launchers than ours: the same bits, and every loss told by name."""

import functools
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from tests.promises import promise
from tests.train.elsewhere import train
from tests.warm import processes
from tests.workers.forked import TIMEOUT_S, job  # noqa: F401

from unisono.runtime.checkpoint.run_directory import RunDirectory

pytestmark = pytest.mark.slow

PROGRAM = str(Path(__file__).parent / "elsewhere.py")
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone")
UNISONO_RUN = (sys.executable, "-m", "unisono", "run", "-n", "3")
SLURM = {
    "SLURM_JOB_ID": str(os.getpid()),
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_TASKS": "{size}",
} | {
    "SLURM_PROCID": "{rank}",
    "SLURM_LOCALID": "{rank}",
    "SLURM_STEP_TASKS_PER_NODE": "{size}",
}
OPEN_MPI = {"OMPI_COMM_WORLD_RANK": "{rank}", "OMPI_COMM_WORLD_SIZE": "{size}"} | {
    "OMPI_COMM_WORLD_LOCAL_RANK": "{rank}",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "{size}",
    "PMIX_NAMESPACE": f"prterun-here-{os.getpid()}@1",
}


@functools.cache
def undisturbed():
    return train()


def in_a_fork(work):
    def one_thread(rank):
        torch.set_num_threads(1)  # the pool of more is not there in a fork
        return work()

    return one_thread


@pytest.mark.parametrize(("world_size", "loader_workers"), [(2, 0), (3, 1)])
def test_bits_are_those_of_one_process(job, world_size, loader_workers):  # noqa: F811
    work = functools.partial(train, loader_workers=loader_workers)
    said = job.run(in_a_fork(work), world_size)
    assert [one.value for one in said] == [undisturbed()] * world_size, said


def test_all_workers_use_the_directory_that_rank_0_has_named(job, tmp_path):  # noqa: F811
    def work():
        return train(str(tmp_path / f"run of {os.getpid()}"), steps=8)

    said = job.run(in_a_fork(work), 2)
    assert not any(one.error for one in said), said
    (directory,) = tmp_path.glob("run of *")
    steps = [entry.step for entry in RunDirectory(directory).entries()]
    assert steps == [8, 7, 6, 4]  # the last is the end of the loop before


@promise("where-it-ends.7")
@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("kill:rank=0,step=9,at=update", "rank 0 has died, its process "),
        ("raise:rank=1,step=9,at=shard", "rank 1 has failed"),
    ],
)
def test_who_is_lost_ends_the_others_by_name(job, fault, words):  # noqa: F811
    said = job.run(in_a_fork(train), 3, UNISONO_FAULTS=fault)
    lost = int(fault.split("rank=")[1][0])
    for rank in {0, 1, 2} - {lost}:
        assert said[rank].error == "PeerLostError", said
        assert words in said[rank].text
        assert "of step 9" in said[rank].text


@promise("where-it-ends.7")
@pytest.mark.parametrize(
    ("signum", "error", "words"),
    [
        (signal.SIGKILL, "PeerLostError", "rank 0 has died, its process "),
        (signal.SIGSTOP, "WaitTimeoutError", "the previous checkpoint must be written"),
    ],
)
def test_a_worker_that_is_lost_while_it_writes_a_checkpoint(
    job,  # noqa: F811
    tmp_path,
    monkeypatch,
    signum,
    error,
    words,
):
    """The last checkpoint of a loop, of step 4, waits for that of step 3."""

    def gone(*_):
        time.sleep(0.5)  # the others come to where they wait
        os.kill(os.getpid(), signum)
        time.sleep(TIMEOUT_S)

    monkeypatch.setattr(RunDirectory, "write", gone)
    work = in_a_fork(functools.partial(train, str(tmp_path / "run"), steps=8, every=3))
    forks = [
        job.start(functools.partial(work, rank), rank, 2, UNISONO_MEETING_TIMEOUT="3")
        for rank in range(2)
    ]
    said = forks[1].end()
    forks[0].kill()
    assert (said.error, words in said.text) == (error, True), said


@promise("where-it-ends.7")
def test_a_run_that_lost_a_worker_goes_on_when_it_is_started_again(job, tmp_path):  # noqa: F811
    work = in_a_fork(functools.partial(train, str(tmp_path / "run")))
    again = {"UNISONO_FAULTS": "kill:rank=1,step=15; kill:rank=0,step=20"}
    first = job.run(work, 3, **again)
    assert first[1].exit_code == -signal.SIGKILL
    second = job.run(work, 3, **again, SLURM_RESTART_COUNT="1")  # faults happen once
    assert [one.value for one in second] == [undisturbed()] * 3, second


def environ(**more):
    kept = {name: value for name, value in os.environ.items() if name != "UNISONO_THREADS"}
    return {**kept, **more}


def started(popen, command, *arguments, **more):
    """Run the program under a launcher; returns what its workers said, in rank order."""
    command = [*command, PROGRAM, *map(str, arguments)]
    done = processes.run(command, popen=popen, env=environ(**more), timeout=100)
    assert done.returncode == 0, done.stderr
    return in_order(done.stdout), done.stderr


def in_order(output):
    return sorted(map(json.loads, output.splitlines()), key=lambda one: one["rank"])


def expected(by, world_size=3):
    facts = {"by": by, "threads": 1, **undisturbed(), "listening": []}
    return [{"rank": rank, **facts} for rank in range(world_size)]


@promise("open-ports.2")
@pytest.mark.slow
def test_bits_under_torchrun_are_those_of_unisono_run():
    ours, told = started(processes.start, UNISONO_RUN)
    assert ours == expected("unisono")
    theirs, told = started(processes.start, (*TORCHRUN, "--nproc-per-node", "2"))
    assert theirs == expected("torchrun", 2)
    assert told.count("24 steps") + told.count("12 steps") == 2  # one worker speaks, for two calls


@promise("open-ports.3")
@pytest.mark.slow
@pytest.mark.parametrize(("by", "variables"), [("Slurm", SLURM), ("Open MPI", OPEN_MPI)])
def test_bits_are_the_same_with_the_variables_of(by, variables):
    ranks = [
        processes.start(
            [sys.executable, PROGRAM],
            env=environ(**{name: v.format(rank=rank, size=2) for name, v in variables.items()}),
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    outputs = [rank.communicate(timeout=100)[0] for rank in ranks]
    assert in_order("".join(outputs)) == expected(by, 2)


@promise("where-it-ends.7")
@pytest.mark.long
def test_a_run_that_torchrun_starts_again_comes_to_the_same_bits(tmp_path):
    faults = {"UNISONO_FAULTS": "kill:rank=1,step=9"}
    command = (*TORCHRUN, "--nproc-per-node", "2", "--max-restarts", "1")
    said, told = started(subprocess.Popen, command, tmp_path / "run", **faults)
    assert said == expected("torchrun", 2)
    assert "resuming from checkpoint" in told
