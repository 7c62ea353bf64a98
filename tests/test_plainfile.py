"""A file of a directory is opened as itself or not at all."""

import os
import signal
import socket
import threading
from pathlib import Path

import pytest

from unisono.errors import NotPlainFileError
from unisono.runtime.plainfile import check_plain, is_at, open_plain, written_whole

READING, WRITING = os.O_RDONLY, os.O_RDWR | os.O_CREAT | os.O_APPEND


def make_link(path, outside):
    path.symlink_to(outside)


def make_dangling_link(path, outside):
    path.symlink_to(outside.with_name("nowhere"))


def make_pipe(path, outside):
    os.mkfifo(path)


def make_socket(path, outside):
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(path))


def make_folder(path, outside):
    path.mkdir()


def make_hard_link(path, outside):
    os.link(outside, path)


STAND_INS = {
    "a symbolic link": make_link,
    "a symbolic link ": make_dangling_link,
    "a named pipe": make_pipe,
    "a socket": make_socket,
    "a directory": make_folder,
    "several names": make_hard_link,
}


@pytest.fixture
def outside(tmp_path):
    path = tmp_path / "outside"
    path.write_bytes(b"of somebody else\nbinary")
    return path


@pytest.fixture
def path(tmp_path):
    (tmp_path / "run").mkdir()
    return tmp_path / "run" / "events.jsonl"


@pytest.mark.parametrize("seen", STAND_INS)
def test_what_has_the_name_of_a_file_and_is_none_is_refused(path, outside, seen):
    STAND_INS[seen](path, outside)
    with pytest.raises(NotPlainFileError, match=seen.strip()):
        check_plain(path)
    with pytest.raises(OSError, match=rf"{seen.strip()}|Is a directory"):
        open_plain(path, WRITING)
    assert outside.read_bytes() == b"of somebody else\nbinary"
    assert sorted(os.listdir(outside.parent)) == ["outside", "run"]


@pytest.mark.parametrize("seen", [seen for seen in STAND_INS if seen != "several names"])
def test_nothing_else_is_read_either(path, outside, seen):
    STAND_INS[seen](path, outside)
    with pytest.raises(NotPlainFileError, match=seen.strip()):
        open_plain(path, READING)


def test_a_file_with_two_names_may_be_read(path, outside):
    os.link(outside, path)
    os.close(open_plain(path, READING))


def test_a_device_is_not_opened():
    for name in ("/dev/null", "/dev/zero"):
        with pytest.raises(NotPlainFileError, match="a device"):
            open_plain(Path(name), READING)


def test_a_file_is_made_and_opened_again_through_a_link_to_its_folder(path):
    link = path.parent.with_name("link")
    link.symlink_to(path.parent)
    fd = open_plain(link / path.name, WRITING)
    os.write(fd, b"a line\n")
    os.close(fd)
    check_plain(link / path.name)
    assert path.read_bytes() == b"a line\n"


def test_what_is_not_there_is_not_refused(path):
    check_plain(path)
    check_plain(path / "below" / "what is not there")
    with pytest.raises(FileNotFoundError):
        open_plain(path, READING)


def test_names_in_messages_cannot_steer_a_terminal(tmp_path):
    path = tmp_path / "a\n\x1b[31mrun\udcff"
    path.mkdir()
    with pytest.raises(NotPlainFileError) as caught:
        check_plain(path)
    assert str(caught.value).isprintable()
    assert r"a\n\x1b[31mrun\udcff" in str(caught.value)


def test_a_file_that_was_moved_or_replaced_is_not_at_its_name(path):
    fd = open_plain(path, WRITING)
    assert is_at(path, fd)
    path.rename(path.with_name("moved"))
    assert not is_at(path, fd)
    path.symlink_to("moved")
    assert not is_at(path, fd)
    os.close(fd)


def test_a_file_is_written_whole_or_not_at_all(path):
    path.write_bytes(b"old")
    with pytest.raises(KeyError), written_whole(path) as file:
        file.write(b"ne")
        assert path.read_bytes() == b"old"
        raise KeyError
    assert (os.listdir(path.parent), path.read_bytes()) == ([path.name], b"old")
    write_new(path)
    assert (os.listdir(path.parent), path.read_bytes()) == ([path.name], b"new")


def test_who_writes_the_same_file_does_not_wait(path):
    with written_whole(path) as file:
        file.write(b"newer")
        other = threading.Thread(target=write_new, args=[path])
        other.start()
        other.join()
        assert path.read_bytes() == b"new"
        assert len(os.listdir(path.parent)) == 2
    assert (os.listdir(path.parent), path.read_bytes()) == ([path.name], b"newer")


def test_what_a_killed_process_has_left_the_next_removes(path):
    pid = os.fork()
    if not pid:
        with written_whole(path):
            os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(pid, 0)
    others = path.with_name(f".{path.name}.00000000-{pid}-1.part")  # of another host
    others.touch()
    assert len(os.listdir(path.parent)) == 2
    write_new(path)
    assert sorted(os.listdir(path.parent)) == [others.name, path.name]


def write_new(path):
    with written_whole(path) as file:
        file.write(b"new")
