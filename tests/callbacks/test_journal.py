"""Each line stands there once when steps come again and when another worker writes on."""

import errno
import os
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
    assert not worker.path.parent.exists()


@pytest.mark.parametrize("tail_bytes", [1, 3, 8, 64])
def test_blocks_may_end_anywhere_in_a_line(worker, monkeypatch, tail_bytes):
    monkeypatch.setattr(module, "_TAIL_BYTES", tail_bytes)
    worker.step(*range(8, 13))
    worker.journal.note(b"a note\n")
    worker.step(13)
    worker.journal.close()
    with worker.path.open("a") as file:
        file.write("torn")
    after = Worker(worker.path)
    after.step(12, 13, 14)
    assert after.lines == [*steps(*range(8, 13)), "a note", *steps(13, 14)]
    after.journal.begin(10)
    after.step(10)
    assert after.lines == [*steps(8, 9), "a note", *steps(10)]


def test_a_step_that_comes_again_has_its_line(worker):
    worker.step(0, 1, 2)
    worker.journal.note(b"went back\n")
    worker.step(1, 2, 3)
    assert worker.lines == [*steps(0, 1, 2), "went back", *steps(3)]


def test_a_resumed_run_begins_a_new_file_only_if_it_has_to(worker):
    worker.step(0, 1, 2)
    worker.journal.note(b"a note\n")
    before = worker.path.stat().st_ino
    worker.journal.begin(3)
    assert (worker.path.stat().st_ino, worker.lines[-1]) == (before, "a note")
    with worker.path.open("rb") as reader:
        worker.journal.begin(1)
        assert worker.lines == [*steps(0), "a note"]
        assert reader.read() == b"step 0\nstep 1\nstep 2\na note\n"  # nobody cuts what is read


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
        worker.journal.begin(0)
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
    worker.journal.begin(0)
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
    worker.journal.begin(0)
    worker.journal.begin(1)
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


@pytest.mark.parametrize("act", ["flush", "close"])
def test_what_waits_is_written_when_it_has_to_be(worker, clock, act):
    worker.step(0, 1, 2, may_wait=True)
    getattr(worker.journal, act)()
    assert worker.lines == steps(0, 1, 2)


def test_what_waits_comes_before_what_follows_it(worker, clock):
    worker.step(0, 1, 2, may_wait=True)
    worker.journal.note(b"a note\n")
    assert worker.lines == [*steps(0, 1, 2), "a note"]


def test_a_note_of_another_worker_changes_nothing_for_the_leader(tmp_path, clock):
    writer, other = Worker(tmp_path / "lines.txt"), Worker(tmp_path / "lines.txt")
    writer.step(0, 1, 2, 3, may_wait=True)
    other.step(0, 1, 2, 3, writes=False)
    other.journal.note(b"rank 1 failed\n")
    writer.journal.close()
    assert sorted(writer.lines) == ["rank 1 failed", *steps(0, 1, 2, 3)]


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
    workers, leader, position, num_done, notes = [Worker(path), Worker(path)], 0, 0, 0, 0
    workers[1].fit.is_leader = False

    def step(of, *, may_wait=False):
        for rank in of:
            workers[rank].step(position, writes=rank == leader, may_wait=may_wait)
        return position + 1

    for act in [*acts, ("step", False)]:
        if act[0] == "step":
            position = step((0, 1), may_wait=act[1])
        elif act[0] == "back":
            position = max(0, position - act[1])
        elif act[0] == "lose":  # just before it wrote the newest step
            position = step([1 - leader])
            workers[leader] = Worker(path)
            workers[leader].fit.is_leader = False
            leader = 1 - leader
            workers[leader].fit.is_leader = True
            workers[leader].journal.flush()
        else:
            notes += 1
            workers[notes % 2].journal.note(b"a note\n")
        num_done = max(num_done, position)
    workers[leader].journal.flush()
    lines = workers[leader].lines
    assert [line for line in lines if line != "a note"] == steps(*range(num_done))
    assert lines.count("a note") == notes


def test_the_last_note_is_the_last_whole_line(worker):
    assert worker.journal.last_note() == b""
    assert not worker.path.exists()
    worker.step(1, 2)
    assert worker.journal.last_note() == b""
    worker.journal.note(b"a note\n")
    with open(worker.path, "a") as file:
        file.write("torn")
    worker.journal.close()
    assert worker.journal.last_note() == b"a note\n"
    after = Worker(worker.path)
    assert after.journal.last_note() == b"a note\n"
    after.step(1, 2, 3)  # to look makes nobody the writer
    assert after.lines == [*steps(1, 2), "a note", *steps(3)]


def test_a_file_that_another_run_has_begun_meanwhile_is_left_to_it(tmp_path):
    """Two jobs with one `path` had their steps in one file, and loggers took them for one run's."""
    one, other = Worker(tmp_path / "lines"), Worker(tmp_path / "lines")
    for worker, name in ((one, b"one\n"), (other, b"other\n")):
        worker.journal.begin(0)
        worker.journal.note(name)
        worker.step(0, 1)
    one.step(2, 3)
    other.step(2)
    one.step(4)
    assert other.lines == ["other", *steps(0, 1, 2)]
    assert (tmp_path / "lines-1").read_text().splitlines() == ["one", *steps(0, 1)]
    assert len(one.said) == 1
    assert "another run has begun it meanwhile" in one.said[0]
    assert other.said == []
