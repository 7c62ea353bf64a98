"""Workers of another launcher find each other, as real processes; a row for what can go wrong."""

import atexit
import contextlib
import functools
import os
import signal
import time
from pathlib import Path

import pytest
import torch.distributed as dist
from tests.promises import promise
from tests.workers.forked import job  # noqa: F401

import unisono
import unisono.runtime.workers.job_store
from unisono.runtime.workers.context import context
from unisono.runtime.workers.job_store import JobName, announcements

pytestmark = pytest.mark.slow


def meet_once():
    team = context().team()
    assert context().team() is team  # of all runs of a process
    heard = team.gather(str(os.getpid()).encode(), "who is there")
    return {rank: int(pid) for rank, pid in heard.items()}


@promise("open-ports.3")
@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("last", [0, 1])
def test_whoever_comes_last_they_find_each_other(job, world_size, last):  # noqa: F811
    order = [rank for rank in range(world_size) if rank != last] + [last]
    forks = {rank: job.start(meet_once, rank, world_size) for rank in order}
    said = {rank: fork.end() for rank, fork in forks.items()}
    pids = {str(rank): fork.pid for rank, fork in forks.items()}
    assert [said[rank].value for rank in order] == [pids] * world_size, said


def test_two_jobs_at_once_do_not_mix(job):  # noqa: F811
    forks = [
        job.start(meet_once, rank, 2, MASTER_PORT=port) for rank in (0, 1) for port in ("1", "2")
    ]
    said = [fork.end() for fork in forks]
    pids = [fork.pid for fork in forks]
    assert said[0].value == said[2].value == {"0": pids[0], "1": pids[2]}, said
    assert said[1].value == said[3].value == {"0": pids[1], "1": pids[3]}, said


def test_a_rank_0_that_was_killed_is_not_found(job):  # noqa: F811
    first = job.start(meet_once, 0, 2)
    job.wait_for_rank_0(2)
    first.kill()
    assert first.end().exit_code == -signal.SIGKILL
    rank_1 = job.start(meet_once, 1, 2)
    rank_0 = job.start(meet_once, 0, 2)
    assert rank_1.end().value == rank_0.end().value == {"0": rank_0.pid, "1": rank_1.pid}


def test_where_an_earlier_rank_has_died_nobody_sits_down(job):  # noqa: F811
    rank_0 = job.start(meet_once, 0, 3)
    job.wait_for_rank_0(3)
    rank_1 = job.start(meet_once, 1, 3)
    wait_for_rank_1(rank_0.pid)
    # Rank 0 of the earlier job is stopped, so it is found there.
    rank_0.kill(signal.SIGSTOP)
    rank_1.kill()
    rank_1.end()
    again = job.start(meet_once, 1, 3, UNISONO_RENDEZVOUS_TIMEOUT="0.3")
    said = again.end()
    assert said.error == "WaitTimeoutError"
    assert "an earlier rank 1 has died there" in said.text


def wait_for_rank_1(pid_of_0):
    """Wait until rank 1 has come to the store that rank 0 has made."""
    with memory_of_store(pid_of_0) as fd:
        store = dist.FileStore(f"/proc/self/fd/{fd}", -1)
        while not store.check(["unisono/0/1/process/1"]):
            time.sleep(0.001)


@contextlib.contextmanager
def memory_of_store(pid):
    """Open the memory of a process's store; the process opens and closes it again and again."""
    fd = None
    while fd is None:
        for path in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                if "memfd:unisono-store" in os.readlink(path):
                    fd = os.open(path, os.O_RDWR)
                    break
    try:
        yield fd
    finally:
        os.close(fd)


@contextlib.contextmanager
def somebody_who_says(name, user):
    """Have a process of a user with an empty memory of that name open."""
    reading, writing = os.pipe()
    pid = os.fork()
    if not pid:
        os.setresuid(user, user, user)
        os.memfd_create(name.format(pid=os.getpid()))
        os.write(writing, b"x")
        signal.pause()
    try:
        os.read(reading, 1)
        yield
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        os.close(reading)
        os.close(writing)


@promise("open-ports.3")
@pytest.mark.skipif(os.geteuid() != 0, reason="takes root")
def test_another_user_is_not_believed():
    name = JobName("job-of-a-test", "")
    with somebody_who_says("unisono-job-of-a-test-{pid}-3", os.geteuid()):
        assert len(announcements(name)) == 1
    with somebody_who_says("unisono-job-of-a-test-{pid}-3", 65534):
        assert announcements(name) == []


def test_what_a_fork_has_inherited_says_nothing():
    name = JobName("job-of-a-test", "")
    with somebody_who_says("unisono-job-of-a-test-1-3", os.geteuid()):
        assert announcements(name) == []


@pytest.mark.parametrize("rank", [0, 1])
def test_a_second_process_of_the_same_rank_is_refused(job, rank):  # noqa: F811
    first = [job.start(meet_once, one, 3) for one in (0, 1)]
    job.wait_for_rank_0(3)
    wait_for_rank_1(first[0].pid)

    def soon():
        unisono.runtime.workers.job_store._TAKEN_AT_MOST_S = 0.1
        meet_once()

    said = job.start(soon, rank, 3).end()
    assert said.error == "RendezvousError"
    assert f"another process has joined as rank {rank} of 3" in said.text
    last = job.start(meet_once, 2, 3)  # the others are not disturbed
    assert [fork.end().error for fork in (*first, last)] == ["", "", ""]


@pytest.mark.parametrize(("come", "missing"), [((0, 2), "rank 1"), ((1, 2), "rank 0")])
def test_who_does_not_come_is_named(job, come, missing):  # noqa: F811
    said = job.together(meet_once, come, 3, UNISONO_RENDEZVOUS_TIMEOUT="0.8")
    assert {one.error for one in said} == {"WaitTimeoutError"}
    for one in said:
        assert f"within 0.8 s, but {missing} has not: " in one.text
        assert f"started by somebody, MASTER_ADDR=127.0.0.1, MASTER_PORT={os.getpid()}1" in one.text
        assert "on one host, by the same user and in the same container" in one.text


def test_who_dies_before_all_have_come_is_named(job):  # noqa: F811
    forks = [job.start(meet_once, rank, 3) for rank in (0, 1)]
    job.wait_for_rank_0(3)
    wait_for_rank_1(forks[0].pid)
    forks[1].kill()
    said = forks[0].end()
    assert said.error == "PeerLostError"
    assert "rank 1 has ended while rank 0 waits there" in said.text


def lose(how):
    """Rank 1 leaves after the first meeting; the others wait for it."""

    def work(rank):
        team = context().team()
        team.note_step(41)
        team.meet("first")
        if rank == 1:
            how()
            return None
        start = time.monotonic()
        try:
            team.meet("second")
        except Exception as error:
            return type(error).__name__, str(error), time.monotonic() - start
        return None

    return work


def fail():
    raise ValueError("mine")


@pytest.mark.parametrize(
    ("how", "words"),
    [
        (lambda: os.kill(os.getpid(), signal.SIGKILL), "rank 1 has died, its process "),
        (lambda: os._exit(0), "rank 1 has died, its process "),
        (lambda: None, "rank 1 has finished its program"),
        (fail, "rank 1 has failed"),
    ],
)
def test_who_is_lost_is_named_to_those_who_wait(job, how, words):  # noqa: F811
    said = job.run(lose(how), 3)
    for rank in (0, 2):
        name, text, _ = said[rank].value
        assert name == "PeerLostError"
        assert words in text
        assert "last seen in step 41" in text


def test_what_a_worker_forks_has_no_seat_and_ends_alone(job):  # noqa: F811
    def in_a_fork(act):
        pid = os.fork()
        if not pid:
            try:
                act()
            except RuntimeError as error:
                os._exit(7 if "must not train in its place" in str(error) else 8)
            finally:
                atexit._run_exitfuncs()  # as an interpreter does
            os._exit(0)
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

    def work(rank):
        team = context().team()
        codes = [in_a_fork(lambda: context().team()), in_a_fork(lambda: None)]
        team.meet("after")
        return codes

    assert [one.value for one in job.run(work, 2)] == [[7, 0]] * 2


def test_what_a_worker_starts_before_it_has_come_may_be_the_worker(job):  # noqa: F811
    def in_a_wrapper():
        fork = os.fork()
        if not fork:
            os._exit(0 if len(meet_once()) == 2 else 1)
        return os.waitstatus_to_exitcode(os.waitpid(fork, 0)[1])

    assert [one.value for one in job.run(lambda rank: in_a_wrapper(), 2)] == [0, 0]


def test_memory_is_shared_and_zero_at_first(job):  # noqa: F811
    def work(rank):
        team = context().team()
        memories = [team.memory(key, 1000 + key) for key in (5, 6)]
        team.meet("there")
        was_zero = not any(memories[1].read(0, len(memories[1].mapping)))
        team.meet("looked at")
        memories[1].write(rank, bytes([rank + 1]))
        team.meet("written")
        return was_zero, list(memories[1].read(0, 4)), list(memories[0].read(0, 4))

    assert [one.value for one in job.run(work, 3)] == [[True, [1, 2, 3, 0], [0] * 4]] * 3


def test_memories_of_different_sizes_are_refused_on_every_worker(job):  # noqa: F811
    said = job.run(lambda rank: context().team().memory(0, 100 + (rank == 2)), 3)
    for one in said:
        assert one.error == "MismatchError"
        assert "request 0 of rank 0 is for 100 bytes" in one.text
        assert "of rank 2 for 101" in one.text


@pytest.mark.parametrize(
    ("more", "error", "words"),
    [
        ({"UNISONO_PID": "1"}, "RuntimeError", "must not train in its place"),
        ({"UNISONO_RENDEZVOUS_TIMEOUT": "soon"}, "ValueError", "000, but is 'soon'"),
        ({"UNISONO_RENDEZVOUS_TIMEOUT": "-1"}, "ValueError", "000, but is '-1'"),
    ],
)
def test_who_cannot_take_a_seat_is_told_why(job, more, error, words):  # noqa: F811
    said = job.start(meet_once, 1, 2, **more).end()
    assert said.error == error
    assert words in said.text


def test_launching_inside_of_a_worker_is_refused(job):  # noqa: F811
    launch = functools.partial(unisono.launch, len, (), workers=1)
    said = job.start(launch, 1, 2, TORCHELASTIC_RUN_ID="x").end()
    assert said.error == "RuntimeError"
    assert "torchrun has started this process as rank 1 of 2" in said.text
