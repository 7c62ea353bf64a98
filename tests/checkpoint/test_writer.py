"""Snapshots become checkpoints in a thread, or it is said why not; never a mixture of two."""

import errno
import json
import mmap
import os
import struct
import threading
from dataclasses import asdict, replace

import pytest

from unisono.runtime.checkpoint import folder
from unisono.runtime.checkpoint.run_directory import ENDED, RunDirectory
from unisono.runtime.checkpoint.slots import Places, write_blob
from unisono.runtime.checkpoint.writer import CheckpointWriter, SlotToWrite, newest_to_write

PLACES = Places(7, 16384, 0, (4096, 8192), 4096, 64)
NOTHING = json.dumps({"model.safetensors": [], "optimizer.safetensors": []}).encode()


@pytest.fixture
def memory():
    with mmap.mmap(-1, PLACES.num_bytes) as mapping:
        yield mapping


def snapshot(memory, slot, step, mark):
    facts = json.dumps({"position": {"step": step, "epoch": 0, "batch": 0}}).encode()
    start = PLACES.slots_at[slot]
    with memoryview(memory) as whole, whole[start : start + PLACES.slot_bytes] as view:
        write_blob(view, PLACES.blob_at, facts, NOTHING)
    memory[PLACES.mark_at(slot) : PLACES.mark_at(slot) + 8] = struct.pack("<Q", mark)


def kept(slot, step, directory):
    return SlotToWrite(PLACES, slot, step, str(directory), 3)


def told_of_writing(memory, directory):
    told = []
    writer = CheckpointWriter(told.append)
    writer.begin(memory, kept(0, 5, directory))
    writer.wait()
    return told


def test_the_newest_whole_snapshot_is_found(memory, tmp_path):
    loop = {**asdict(PLACES), "directory": str(tmp_path), "keep": 2}
    assert newest_to_write(memory, loop) is None
    snapshot(memory, 0, 0, mark=1)
    assert newest_to_write(memory, loop) is None, "nothing is done yet"
    snapshot(memory, 0, 5, mark=1)
    assert newest_to_write(memory, loop).step == 5
    snapshot(memory, 1, 9, mark=2)
    assert newest_to_write(memory, loop).step == 9
    snapshot(memory, 0, 5, mark=3)
    assert newest_to_write(memory, loop).step == 5


def test_a_snapshot_is_written_and_marked_busy_meanwhile(memory, tmp_path, monkeypatch):
    go_on, told = threading.Event(), []
    write = folder._write_synced
    monkeypatch.setattr(folder, "_write_synced", lambda *args: go_on.wait(10) and write(*args))
    snapshot(memory, 0, 5, mark=1)
    writer = CheckpointWriter(told.append)
    writer.begin(memory, kept(0, 5, tmp_path))
    assert PLACES.is_busy(0, lambda offset, count: memory[offset : offset + count])
    go_on.set()
    writer.wait()
    assert not PLACES.is_busy(0, lambda offset, count: memory[offset : offset + count])
    assert [(entry.step, entry.trouble) for entry in RunDirectory(tmp_path).entries()] == [(5, "")]
    assert told == []


@pytest.mark.parametrize(("step", "mark"), [(4, 1), (6, 1), (5, 0)])
def test_a_slot_that_holds_another_step_or_is_not_whole_is_not_written(
    memory, tmp_path, step, mark
):
    snapshot(memory, 0, step, mark)
    told = told_of_writing(memory, tmp_path)
    assert RunDirectory(tmp_path).entries() == []
    assert "a snapshot must stay as it is" in told[0]


@pytest.mark.parametrize("mark", [0, 3])
def test_a_slot_that_changes_while_it_is_written_leaves_nothing(
    memory, tmp_path, monkeypatch, mark
):
    write = folder._write_synced

    def change_and_write(path, *args):
        if path.name == "optimizer.safetensors":
            snapshot(memory, 0, 7, mark=mark)
        return write(path, *args)

    monkeypatch.setattr(folder, "_write_synced", change_and_write)
    snapshot(memory, 0, 5, mark=1)
    told = told_of_writing(memory, tmp_path)
    assert RunDirectory(tmp_path).entries() == []
    assert list((tmp_path / "checkpoints").iterdir()) == []
    assert "step 5: no checkpoint: a snapshot must stay as it is" in told[0]


def test_the_disk_is_full_when_it_is_asked_to_be(memory, tmp_path):
    told = []
    writer = CheckpointWriter(told.append, lambda number: number == 1)
    for step, mark in ((5, 1), (6, 3)):
        snapshot(memory, 0, step, mark)
        writer.begin(memory, kept(0, step, tmp_path))
        writer.wait()
    assert [entry.step for entry in RunDirectory(tmp_path).entries()] == [6]
    assert len(told) == 1
    assert "step 5: no checkpoint: [Errno 28] No space left on device; training c" in told[0]


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS, errno.ESTALE])
def test_what_a_disk_refuses_is_said(memory, tmp_path, monkeypatch, code):
    def fail(*args):
        raise OSError(code, os.strerror(code))

    snapshot(memory, 0, 5, mark=1)
    monkeypatch.setattr(folder, "_write_synced", fail)
    told = told_of_writing(memory, tmp_path)
    assert f"{os.strerror(code)}; training continues, and the next one is tried" in told[0]


@pytest.mark.parametrize("error", [MemoryError(), ImportError("numpy")])
def test_whatever_fails_the_state_is_not_saved(memory, tmp_path, monkeypatch, error):
    def fail(*args):
        raise error

    snapshot(memory, 0, 5, mark=1)
    monkeypatch.setattr(folder, "_write_synced", fail)
    told = []
    writer = CheckpointWriter(told.append)
    writer.begin(memory, kept(0, 5, tmp_path))
    writer.wait()
    assert f"no checkpoint: {str(error) or 'MemoryError'}; training" in told[0]
    assert "of step 5, is NOT on the disk" in writer.not_saved


def test_without_another_thread_a_snapshot_is_written_in_this_one(memory, tmp_path, monkeypatch):
    def refuse(thread):
        raise RuntimeError("can't start new thread")

    snapshot(memory, 0, 5, mark=1)
    monkeypatch.setattr(threading.Thread, "start", refuse)
    assert told_of_writing(memory, tmp_path) == []
    assert [(entry.step, entry.trouble) for entry in RunDirectory(tmp_path).entries()] == [(5, "")]
    assert not PLACES.is_busy(0, lambda offset, count: memory[offset : offset + count])


def test_a_checkpoint_whose_mark_finds_no_room_is_on_the_disk(memory, tmp_path, monkeypatch):
    def fail(*args):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    snapshot(memory, 0, 5, mark=1)
    monkeypatch.setattr(RunDirectory, "mark_end", fail)
    told = []
    writer = CheckpointWriter(told.append)
    writer.begin(memory, replace(kept(0, 5, tmp_path), end=ENDED + "loop 1"))
    writer.wait()
    assert "step 5: the checkpoint is on the disk, but is not marked" in told[0]
    assert (len(told), writer.not_saved) == (1, "")
    assert writer.newest.startswith("step 5 is on the disk")
