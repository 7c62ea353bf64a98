"""What was read stays as it was, and other processes of the host read it, too."""

import os

import pytest
import torch
from safetensors.torch import save

from unisono.engine.state.saved import read_tensors
from unisono.runtime.checkpoint.sealed import CHUNK_BYTES, Sealed


@pytest.mark.parametrize("size", [0, 1, CHUNK_BYTES - 1, CHUNK_BYTES, 2 * CHUNK_BYTES + 3])
def test_chunks_come_back_as_they_were(size):
    data = os.urandom(size)
    sealed = Sealed.of([data[: size // 3], memoryview(data)[size // 3 :]])
    assert len(sealed) == size
    assert b"".join(sealed) == data
    assert max(map(len, sealed), default=0) <= CHUNK_BYTES


def test_nobody_changes_them():
    sealed = Sealed.of([b"as it was"])
    for change in (
        lambda fd: os.write(fd, b"x"),
        lambda fd: os.ftruncate(fd, 3),
        lambda fd: os.ftruncate(fd, 30),
    ):
        fd = os.open(sealed.path, os.O_RDWR)
        try:
            with pytest.raises(PermissionError):
                change(fd)
        finally:
            os.close(fd)
    assert b"".join(sealed) == b"as it was"


def test_another_process_opens_it_as_long_as_it_is_held():
    sealed = Sealed.of([b"for both"])
    place = sealed.place
    reader, writer = os.pipe()
    if (pid := os.fork()) == 0:
        opened = Sealed.open(place)
        os.write(writer, b"".join(opened or [b"nothing"]))
        os._exit(0)
    os.waitpid(pid, 0)
    assert os.read(reader, 100) == b"for both"
    os.close(reader)
    os.close(writer)
    del sealed
    assert Sealed.open(place) is None


def test_memory_that_can_be_changed_or_is_another_is_not_taken():
    fd = os.memfd_create("unisono-file-1")
    try:
        os.write(fd, b"loose")
        assert Sealed.open((os.getpid(), fd, "unisono-file-1", 5)) is None
    finally:
        os.close(fd)
    sealed = Sealed.of([b"some"])
    pid, number, name, size = sealed.place
    assert Sealed.open((pid, number, name + "0", size)) is None
    assert Sealed.open((pid, number, name, size + 1)) is None
    assert Sealed.open((pid, number, name, size)) is not None


def test_tensors_are_views_of_it_and_changes_stay_here():
    sealed = Sealed.of([save({"a": torch.arange(4.0), "b": torch.ones(2, dtype=torch.int8)})])
    here, there = read_tensors(sealed), read_tensors(sealed)
    here["a"].zero_()
    assert there["a"].tolist() == [0.0, 1.0, 2.0, 3.0]
    del sealed
    assert here["b"].tolist() == [1, 1]
    assert there["b"].dtype == torch.int8
