"""A file of lines that stays right when steps come again and when another worker writes on."""

import errno
import fcntl
import os
import threading
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from unisono.training.callbacks import journal as module
from unisono.training.callbacks.journal import Journal


def place_of(line):
    return int(line.split()[1]) if line.startswith(b"step ") else None


def line_of(step):
    return f"step {step}\n".encode()


def alone(say):
    """A call of `fit` of one worker, as a journal sees it."""
    return SimpleNamespace(is_leader=True, is_first=True, directory=None, say=say)


class Worker:
    def __init__(self, path):
        self.path, self.said = path, []
        self.fit = alone(self.said.append)
        self.journal = Journal(path, place_of, self.fit)

    def step(self, *steps, writes=True, may_wait=False):
        for step in steps:
            self.fit.is_leader = writes
            self.journal.add(step, lambda step=step: line_of(step), may_wait=may_wait)

    def cut(self, step, writes=True):
        self.fit.is_leader = writes
        self.journal.cut(step)

    @property
    def lines(self):
        return self.path.read_text().splitlines()


@pytest.fixture
def worker(tmp_path):
    return Worker(tmp_path / "runs" / "lines.txt")


def steps(*numbers):
    return [f"step {number}" for number in numbers]


def test_who_does_not_write_makes_nothing(worker):
    worker.step(0, 1, writes=False)
    worker.cut(1, writes=False)
    assert not worker.path.parent.exists()


@pytest.mark.parametrize("block_bytes", [1, 3, 8, 64])
def test_blocks_may_end_anywhere_in_a_line(worker, monkeypatch, block_bytes):
    monkeypatch.setattr(module, "_BLOCK_BYTES", block_bytes)
    worker.step(*range(8, 13))
    worker.journal.note(b"a note\n")
    worker.step(13)
    worker.cut(10)
    worker.step(10)
    assert worker.lines == [*steps(8, 9), "a note", *steps(10)]


@pytest.mark.parametrize("torn", ["", "step 3", "st", '{"half'])
def test_a_torn_line_is_taken_out_when_somebody_goes_on(worker, torn):
    worker.step(0, 1, 2)
    with worker.path.open("a") as file:
        file.write(torn)
    after = Worker(worker.path)
    after.step(3)
    assert after.lines == steps(0, 1, 2, 3)


def test_another_run_gets_a_file_of_its_own(worker):
    for run in range(3):
        worker.journal.set_aside()
        worker.step(run)
    folder = worker.path.parent
    assert sorted(path.name for path in folder.iterdir()) == [
        "lines-1.txt",
        "lines-2.txt",
        "lines.txt",
    ]
    assert (folder / "lines-1.txt").read_text() == "step 0\n"
    assert worker.lines == steps(2)


def test_a_folder_keeps_its_name(tmp_path):
    worker = Worker(tmp_path)
    worker.journal.set_aside()
    worker.step(0)
    assert tmp_path.is_dir()
    assert not list(tmp_path.parent.glob(f"{tmp_path.name}-*"))
    [line] = worker.said
    assert "but is a directory" in line


def test_trouble_is_told_once_and_ends_nothing(tmp_path):
    (tmp_path / "file").write_text("")
    worker = Worker(tmp_path / "file" / "lines.txt")
    worker.step(0, 1)
    worker.journal.note(b"a note\n")
    worker.cut(0)
    worker.journal.set_aside()
    assert len(worker.said) == 1
    assert "must be writable" in worker.said[0]
    assert "training continues" in worker.said[0]


def test_a_full_disk_leaves_no_half_line(worker, monkeypatch):
    worker.step(0)
    write = os.write

    def full(fd, data):
        return write(fd, data[: len(data) // 2])

    monkeypatch.setattr(os, "write", full)
    worker.step(1)
    monkeypatch.setattr(os, "write", write)
    worker.step(2)
    assert worker.lines == steps(0, 1, 2)
    assert os.strerror(errno.ENOSPC) in worker.said[0]


@pytest.fixture
def clock(monkeypatch):
    now_s = [1000.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now_s[0])
    return now_s


def test_lines_wait_for_others_but_not_long(worker, clock):
    worker.step(*range(9), may_wait=True)
    assert worker.lines == steps(*range(9))  # the first at once, then eight
    worker.step(9, 10, may_wait=True)
    assert worker.lines == steps(*range(9))
    clock[0] += 0.1
    worker.step(11, may_wait=True)
    assert worker.lines == steps(*range(12))
    worker.step(12, may_wait=True)
    worker.step(13)
    assert worker.lines == steps(*range(14))


@pytest.mark.parametrize("act", ["flush", "take_over", "close"])
def test_what_waits_is_written_when_it_has_to_be(worker, clock, act):
    worker.step(0, 1, 2, may_wait=True)
    getattr(worker.journal, act)()
    assert worker.lines == steps(0, 1, 2)


def test_what_waits_comes_before_what_follows_it(worker, clock):
    worker.step(0, 1, 2, may_wait=True)
    worker.journal.note(b"a note\n")
    worker.step(3, 4, may_wait=True)
    worker.cut(4)
    assert worker.lines == [*steps(0, 1, 2), "a note", *steps(3)]


def test_who_notes_something_writes_first_what_another_holds_back(tmp_path, clock):
    writer, other = Worker(tmp_path / "lines.txt"), Worker(tmp_path / "lines.txt")
    writer.step(0, 1, 2, 3, may_wait=True)
    other.step(0, 1, 2, writes=False)
    other.journal.note(b"rank 1 failed\n")
    assert writer.lines == [*steps(0, 1, 2), "rank 1 failed"]
    writer.journal.close()
    assert writer.lines == [*steps(0, 1, 2), "rank 1 failed", *steps(3)]


@pytest.mark.slow
def test_two_who_write_at_once_write_each_line_once(tmp_path):
    path, both = tmp_path / "lines.txt", threading.Barrier(2, timeout=60)

    def write(text):
        worker = Worker(path)
        for step in range(200):
            both.wait()
            worker.step(step)
            worker.journal.note(text)

    others = threading.Thread(target=write, args=(b"another\n",))
    others.start()
    write(b"one\n")
    others.join()
    lines = path.read_text().splitlines()
    assert [line for line in lines if line.startswith("step")] == steps(*range(200))
    assert (lines.count("one"), lines.count("another")) == (200, 200)


def test_nobody_waits_for_ever_for_one_that_stands_still(worker, monkeypatch):
    monkeypatch.setattr(module, "_LOCK_S", 0.0001)
    worker.step(0)
    with open(worker.path) as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        worker.step(1)
    assert worker.lines == steps(0, 1)


def test_a_file_system_without_locks_does(worker, monkeypatch):
    def refuse(fd, operation):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(module.fcntl, "flock", refuse)
    worker.step(0, 1)
    assert worker.lines == steps(0, 1)
    assert not worker.said


ACTS = st.lists(
    st.one_of(
        st.tuples(st.just("step"), st.booleans()),
        st.tuples(st.just("back"), st.integers(1, 5)),
        st.tuples(st.just("lose")),
        st.tuples(st.just("note")),
    ),
    max_size=30,
)


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(acts=ACTS)
def test_each_step_stands_there_once_in_order(tmp_path_factory, acts):
    path = tmp_path_factory.mktemp("journal") / "lines.txt"
    workers, leader, position, notes = [Worker(path) for _ in range(2)], 0, 0, 0
    for act in acts:
        if act[0] == "step":
            for rank, worker in enumerate(workers):
                worker.step(position, writes=rank == leader, may_wait=act[1])
            position += 1
        elif act[0] == "back":
            position = max(0, position - act[1])
            for rank, worker in enumerate(workers):
                worker.cut(position, writes=rank == leader)
        elif act[0] == "lose":  # just before it wrote the newest step
            for rank, worker in enumerate(workers):
                if rank != leader:
                    worker.step(position, writes=False)
            position += 1
            workers[leader] = Worker(path)
            leader = 1 - leader
            workers[leader].journal.take_over()
        else:
            notes += 1
            workers[notes % 2].journal.note(b"a note\n")
    for rank, worker in enumerate(workers):
        worker.step(position, writes=rank == leader)
    lines = workers[leader].lines
    assert [line for line in lines if line != "a note"] == steps(*range(position + 1))
    assert lines.count("a note") == notes


def test_the_last_line_is_the_last_whole_one(worker):
    assert worker.journal.last() == b""
    assert not worker.path.exists()
    worker.step(1, 2)
    assert worker.journal.last() == b"step 2"
    with open(worker.path, "a") as file:
        file.write("torn")
    worker.journal.close()
    assert worker.journal.last() == b"step 2"
