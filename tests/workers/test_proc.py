"""Other processes and their memory: what is there, and what is not there any more."""

import os
import subprocess
import sys

import pytest
from tests.descriptors import none_stay_open

from unisono.runtime.procfs import NotThereError, open_memory, started_at


@pytest.fixture
def memory():
    fd = os.memfd_create("unisono-test")
    os.ftruncate(fd, 4096)
    yield fd
    os.close(fd)


def test_one_that_has_ended_has_no_start():
    ended = subprocess.Popen([sys.executable, "-c", ""])
    os.waitid(os.P_PID, ended.pid, os.WEXITED | os.WNOWAIT)
    assert started_at(ended.pid) is None  # nobody has asked for its exit status yet
    ended.wait()
    assert started_at(ended.pid) is None


@pytest.mark.parametrize(
    ("pid", "fd", "name", "size", "words"),
    [
        (None, None, "unisono-other", 4096, "is not the memory that was told of"),
        (None, None, "unisono-test", 8192, "is memory of another size"),
        (None, 0, "unisono-test", 4096, "is not the memory"),
        (None, 99_999, "unisono-test", 4096, "cannot be opened .No such file"),
        (2**22 + 1, 3, "unisono-test", 4096, "cannot be opened .No such file"),
    ],
)
def test_what_is_something_else_is_not_opened(memory, pid, fd, name, size, words):
    with none_stay_open(), pytest.raises(NotThereError, match=words):
        open_memory(pid or os.getpid(), memory if fd is None else fd, name, size)
