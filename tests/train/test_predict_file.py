"""The file in which predictions lie: its two names, and whose it is."""

import os

import pytest
import torch
from safetensors.torch import load_file
from tests.test_plainfile import STAND_INS

from unisono.runtime.plainfile import open_plain
from unisono.training.predict import check_path, finish_file, make_file, partial_path
from unisono.training.predictions import Rows, header_of

HEADER, NUM_BYTES = header_of({"predictions": torch.zeros(2, 1)}, 4)


def opened(partial):
    fd = open_plain(partial, os.O_RDWR)
    os.pwrite(fd, HEADER, 0)
    return fd


def begin(path):
    """Have somebody collect rows for `path`; give the partial file's name and a descriptor."""
    partial = partial_path(path)
    make_file(partial, NUM_BYTES)
    return partial, opened(partial)


def fill(fd, value):
    Rows(fd, HEADER, ["predictions"], is_private=False).tensors["predictions"].fill_(value)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "rows.safetensors"


def test_two_who_predict_to_one_path_do_not_touch_each_others_rows(path):
    first, first_fd = begin(path)
    second, second_fd = begin(path)
    fill(first_fd, 1.0)
    fill(second_fd, 2.0)
    finish_file(first_fd, first, path)
    assert load_file(path)["predictions"].unique().tolist() == [1.0]
    finish_file(second_fd, second, path)
    assert load_file(path)["predictions"].unique().tolist() == [2.0]
    assert os.listdir(path.parent) == [path.name]
    os.close(first_fd)
    os.close(second_fd)


def test_the_next_lead_finds_that_the_file_has_its_name(path):
    partial, fd = begin(path)
    others_fd = opened(partial)
    finish_file(fd, partial, path)
    os.close(fd)
    finish_file(others_fd, partial, path)
    assert os.listdir(path.parent) == [path.name]
    os.close(others_fd)


def test_a_file_of_somebody_else_is_never_renamed(path):
    partial, fd = begin(path)
    path.write_bytes(b"old")
    partial.unlink()
    partial.write_bytes(b"not ours")
    with pytest.raises(FileNotFoundError, match="removed or replaced meanwhile"):
        finish_file(fd, partial, path)
    assert path.read_bytes() == b"old"
    os.close(fd)


def test_the_next_lead_makes_the_file_of_a_lost_one_anew(path):
    partial, fd = begin(path)
    make_file(partial, NUM_BYTES)
    next_fd = opened(partial)
    assert not os.path.samestat(os.fstat(fd), os.fstat(next_fd))
    finish_file(next_fd, partial, path)
    os.close(fd)
    os.close(next_fd)


def test_a_file_without_room_is_refused_and_leaves_nothing(path):
    with pytest.raises(OSError, match=r"File too large|No space left"):
        make_file(partial_path(path), 1 << 60)
    assert os.listdir(path.parent) == []


@pytest.mark.parametrize("seen", ["a symbolic link", "a symbolic link ", "a named pipe"])
def test_a_name_that_is_something_elses_is_refused_before_anything_is_computed(path, seen):
    outside = path.with_name("outside")
    outside.write_bytes(b"of somebody else")
    STAND_INS[seen](path, outside)
    with pytest.raises(OSError, match=r"a symbolic link|a device, pipe or socket"):
        check_path(path)
    with pytest.raises(OSError, match=r"a symbolic link|a named pipe"):
        open_plain(path, os.O_RDWR)
    assert outside.read_bytes() == b"of somebody else"
