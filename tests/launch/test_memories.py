"""The memory of a job: one for each key, kept as long as somebody may need it."""

from __future__ import annotations

import os
import resource
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.descriptors import none_stay_open

from unisono.runtime.checkpoint.slots import Places, read_facts, write_blob
from unisono.runtime.launch.memories import SharedMemories
from unisono.runtime.workers.launcher_messages import ROW_KEYS


@pytest.fixture
def memories() -> Iterator[SharedMemories]:
    memories = SharedMemories()
    yield memories
    memories.close()


def test_whoever_asks_with_one_key_gets_one_memory(memories: SharedMemories) -> None:
    fds = [memories.request(rank, key, 64) for rank in range(2) for key in (0, 7)]
    assert fds[:2] == fds[2:]
    assert fds[0] != fds[1]
    assert os.fstat(fds[0]).st_size == 64


def test_another_size_is_refused_with_both_workers_and_sizes(memories: SharedMemories) -> None:
    memories.request(0, 5, 64)
    with pytest.raises(ValueError, match=r"request 5 of worker 0 is for 64 bytes .* worker 1 for"):
        memories.request(1, 5, 65)


@pytest.mark.parametrize(
    ("released", "forgotten", "needed", "stays"),
    [
        ([], [], [], True),
        ([0], [], [], True),  # another one holds it
        ([0, 1], [], [], False),
        ([0], [1], [], False),  # that one was lost
        ([], [0, 1], [], False),
        ([], [0, 1], [5], True),  # a replacement may need it
        ([0, 1], [], [4], False),
    ],
)
def test_memory_stays_while_somebody_holds_or_may_need_it(
    memories: SharedMemories,
    released: list[int],
    forgotten: list[int],
    needed: list[int],
    stays: bool,
) -> None:
    fd = memories.request(0, 5, 64)
    memories.request(1, 5, 64)
    for rank in released:
        memories.release(rank, 5)
    for rank in forgotten:
        memories.forget(rank)
    memories.drop_unused(needed)
    assert (memories.mapping(5) is not None) is stays
    if not stays:
        with pytest.raises(OSError):
            os.fstat(fd)


def test_predictions_stay_in_a_file_without_a_name(
    memories: SharedMemories, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    fd = memories.request(0, ROW_KEYS + 1, 64)
    memories.forget(0)
    memories.drop_unused([])
    assert memories.request(1, ROW_KEYS + 1, 64) == fd
    assert os.fstat(fd).st_dev == tmp_path.stat().st_dev
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(OSError, match=r"File too large|No space left"):
        memories.request(0, ROW_KEYS + 2, 1 << 60)


def test_the_launcher_sees_what_workers_write(memories: SharedMemories) -> None:
    fd = memories.request(0, 5, 64)
    mapping = memories.mapping(5)
    assert mapping is not None
    os.pwrite(fd, b"written", 8)
    assert mapping[8:15] == b"written"
    assert memories.mapping(5) is mapping
    assert memories.mapping(6) is None


def test_what_loops_have_ended_with_moves_to_a_file_and_is_read_as_before(memories) -> None:
    def read(offset: int, num_bytes: int) -> bytes:
        mapping = memories.mapping(3)
        return b"" if mapping is None else mapping[offset : offset + num_bytes]

    places = Places(3, 1 << 20, 0, (4096, 8192), 4096, 512)
    before = os.fstat(memories.request(0, 3, places.num_bytes)).st_dev
    mapping = memories.mapping(3)
    with memoryview(mapping) as whole, whole[8192 : 8192 + 4096] as slot:
        slot[:5] = b"state"
        write_blob(slot, 512, b'{"step": 7}', b"{}")
    mapping[8:16] = (1).to_bytes(8, "little")
    assert memories.shrink(3, places) == 0  # somebody holds it
    memories.move_to_disk(3, places)
    assert os.fstat(memories.request(1, 3, places.num_bytes)).st_dev == before
    memories.forget(0)
    memories.forget(1)
    assert 512 < memories.shrink(3, places) < 4096
    memories.move_to_disk(3, places)
    assert os.fstat(memories.request(1, 3, places.num_bytes)).st_dev != before
    assert (places.newest(read), read(8192, 5)) == (1, b"state")
    assert read_facts(read(8192, 4096), 512) == {"step": 7}
    assert memories.shrink(3, places) == 0


def test_ended_loops_keep_no_descriptor_each(memories: SharedMemories) -> None:
    places = Places(3, 1 << 20, 0, (4096, 8192), 4096, 512)

    def end_loop(key: int) -> None:
        memories.forget(0)
        memories.shrink(key, places)
        memories.move_to_disk(key, places)

    def run_loop(key: int) -> None:
        os.pwrite(memories.request(0, key, places.num_bytes), b"state %d" % key, 4096)
        with memoryview(memories.mapping(key)) as whole, whole[4096:8192] as slot:
            write_blob(slot, 512, b"{}", b"{}")
            whole[0:8] = (1).to_bytes(8, "little")
        end_loop(key)

    run_loop(0)  # opens the one file that takes them all
    with none_stay_open():
        for key in range(1, 5):
            run_loop(key)
        for key in range(5):  # what a replacement does
            fd = memories.request(0, key, places.num_bytes)
            assert os.pread(fd, 7, 4096) == b"state %d" % key
            os.pwrite(fd, (2).to_bytes(8, "little"), 0)
            end_loop(key)
    assert os.pread(memories.request(0, 4, places.num_bytes), 8, 0) == (2).to_bytes(8, "little")


def test_more_files_are_allowed_once_half_of_them_are_open(memories: SharedMemories) -> None:
    """Of predictions, each call keeps one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    highest = max(map(int, os.listdir("/proc/self/fd")))
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 8, hard))
        for number in range(20):
            memories.request(0, ROW_KEYS + number, 1)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_without_room_for_the_file_nothing_is_kept(memories, monkeypatch) -> None:
    places = Places(3, 1 << 20, 0, (4096, 8192), 4096, 512)
    memories.request(0, 3, places.num_bytes)
    mapping = memories.mapping(3)
    with memoryview(mapping) as whole, whole[4096:8192] as slot:
        write_blob(slot, 512, b"{}", b"{}")
    mapping[0:8] = (1).to_bytes(8, "little")
    memories.forget(0)
    memories.shrink(3, places)
    monkeypatch.setattr(sys.modules[SharedMemories.__module__], "_DISK_SPARE", 1 << 60)
    memories.move_to_disk(3, places)
    assert memories.mapping(3) is None
