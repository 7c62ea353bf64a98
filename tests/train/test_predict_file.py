"""The file in which predictions lie: its two names, and whose it is."""

import os

import pytest
import torch
from safetensors.torch import load_file
from tests.test_plainfile import STAND_INS

from unisono.train.predictions import Rows, header_of
from unisono.train.rowsfile import (
    check_path,
    finish_file,
    identity_of,
    make_file,
    open_file,
    partial_path,
)

CONTENT = header_of({"predictions": torch.zeros(2, 1)}, 4)


def begin(path):
    """Have somebody collect rows for `path`; give the partial file's name and a descriptor."""
    partial = partial_path(path)
    return partial, make_file(partial, *CONTENT)


def fill(fd, value):
    Rows(fd, ["predictions"], is_private=False).tensors["predictions"].fill_(value)


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
    assert identity_of(first_fd) != identity_of(second_fd)
    finish_file(second_fd, second, path)
    assert load_file(path)["predictions"].unique().tolist() == [2.0]
    assert os.listdir(path.parent) == [path.name]
    os.close(first_fd)
    os.close(second_fd)


def test_the_next_lead_finds_that_the_file_has_its_name(path):
    partial, fd = begin(path)
    others_fd = open_file(partial, os.getpid(), fd)
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
    next_fd = make_file(partial, *CONTENT)
    assert identity_of(fd) != identity_of(next_fd)
    finish_file(next_fd, partial, path)
    os.close(fd)
    os.close(next_fd)


def test_a_file_that_was_changed_in_its_place_is_another_one(path):
    partial, fd = begin(path)
    finish_file(fd, partial, path)
    before = identity_of(fd)
    assert identity_of(fd) == before
    os.utime(path, ns=(0, 0))
    assert identity_of(fd) != before
    os.close(fd)


@pytest.mark.parametrize("seen", ["a symbolic link", "a symbolic link ", "a named pipe"])
def test_a_name_that_is_something_elses_is_refused_before_anything_is_computed(path, seen):
    outside = path.with_name("outside")
    outside.write_bytes(b"of somebody else")
    STAND_INS[seen](path, outside)
    with pytest.raises(OSError, match=r"a symbolic link|a device, pipe or socket"):
        check_path(path)
    with pytest.raises(OSError, match=r"a symbolic link|a named pipe"):
        open_file(path, os.getpid(), -1)
    assert outside.read_bytes() == b"of somebody else"
