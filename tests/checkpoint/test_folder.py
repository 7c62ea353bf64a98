"""A checkpoint is whole or it is not one: every truncation and every flipped bit is found."""

import errno
import hashlib
import json
import os
import resource
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tests.promises import promise
from torch import nn

from unisono.engine.state.contents import digest_of
from unisono.errors import CheckpointError
from unisono.runtime.checkpoint import folder, run_directory
from unisono.runtime.checkpoint.folder import (
    COMMIT,
    FILES,
    TooLargeError,
    check_folder,
    read_folder,
    write_folder,
)
from unisono.runtime.checkpoint.run_directory import RunDirectory

CONTENTS = {name: f"of {name}".encode() for name in FILES}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    path = tmp_path_factory.mktemp("run") / "step-000000000001"
    write_folder(path, CONTENTS)
    return path


@pytest.fixture
def damaged(whole, tmp_path):
    """A copy of the whole one, to be damaged."""
    return Path(shutil.copytree(whole, tmp_path / "damaged"))


def contents(files):
    return {name: b"".join(file) for name, file in files.items()}


def test_what_was_written_is_read(whole):
    assert check_folder(whole) == {name: len(data) for name, data in CONTENTS.items()}
    assert contents(read_folder(whole)) == CONTENTS
    assert contents(read_folder(whole, wanted=FILES[:1])) == {FILES[0]: CONTENTS[FILES[0]]}
    assert sorted(os.listdir(whole)) == sorted([*FILES, COMMIT])


@promise("nothing-lost.14")
@pytest.mark.parametrize("name", FILES)
def test_every_truncation_is_found(damaged, name):
    data = (damaged / name).read_bytes()
    for length in range(len(data)):
        (damaged / name).write_bytes(data[:length])
        with pytest.raises(CheckpointError, match="must have"):
            check_folder(damaged)


@promise("nothing-lost.14")
@pytest.mark.parametrize("name", FILES)
def test_every_flipped_bit_is_found(damaged, name):
    data = (damaged / name).read_bytes()
    for bit in range(8 * len(data)):
        flipped = bytearray(data)
        flipped[bit // 8] ^= 1 << bit % 8
        (damaged / name).write_bytes(flipped)
        with pytest.raises(CheckpointError, match="checksum"):
            check_folder(damaged)


@pytest.mark.slow
def test_a_damaged_commit_file_is_found_or_says_the_same(damaged):
    data = (damaged / COMMIT).read_bytes()
    for place in range(len(data)):
        for text in (data[:place], data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :]):
            (damaged / COMMIT).write_bytes(text)
            try:
                check_folder(damaged)
            except CheckpointError:
                continue
            assert json.loads(text) == json.loads(data)


HOSTILE_COMMITS = {
    "deep lists": b"[" * 60_000,
    "deep objects": b'{"a":' * 12_000,
    "a huge number": b'{"model.safetensors": {"bytes": ' + b"9" * 50_000 + b"}}",
    "not UTF-8": b"\xff\xfe{",
    "a number that is none": b'{"model.safetensors": {"bytes": NaN}}',
    "a size below zero": json.dumps(
        {name: {"bytes": -1, "sha256": "0" * 64} for name in FILES}
    ).encode(),
    "a size beyond all": json.dumps(
        {name: {"bytes": 10**4000, "sha256": "0" * 64} for name in FILES}
    ).encode(),
    "half a character": json.dumps(
        {name: {"bytes": 1, "sha256": "\ud800\0"} for name in FILES}
    ).encode(),
}


@pytest.mark.parametrize("commit", HOSTILE_COMMITS)
def test_a_hostile_commit_file_is_refused_in_a_short_line(damaged, commit):
    (damaged / COMMIT).write_bytes(HOSTILE_COMMITS[commit])
    with pytest.raises(CheckpointError) as caught:
        check_folder(damaged)
    assert len(str(caught.value)) < 200
    assert str(caught.value).isprintable()


def test_the_checkpoint_before_one_with_a_hostile_commit_file_is_used(tmp_path):
    store = RunDirectory(tmp_path)
    for step in (1, 2):
        store.write(step, CONTENTS)
    (tmp_path / "checkpoints" / "step-000000000002" / COMMIT).write_bytes(b"[" * 60_000)
    read, entry, (passed_over,) = store.newest(contents)
    assert (read, entry.step, passed_over.step) == (CONTENTS, 1, 2)
    assert [entry.trouble for entry in store.entries()][1] == ""


@pytest.fixture
def sparse(tmp_path):
    """A folder with a file of 256 GiB, most of it holes, that its commit file confirms."""
    path = tmp_path / "checkpoints" / "step-000000000007"
    write_folder(path, CONTENTS)
    facts = json.loads((path / COMMIT).read_text())
    facts["model.safetensors"]["bytes"] = 256 << 30
    (path / COMMIT).write_text(json.dumps(facts))
    os.truncate(path / "model.safetensors", 256 << 30)
    return path


def test_a_file_beyond_what_is_needed_is_refused_unread(sparse, tmp_path, monkeypatch):
    monkeypatch.setattr(folder.hashlib, "sha256", None)  # to hash it would take minutes
    at_most = {"model.safetensors": 1 << 20}
    message = r"model\.safetensors must have at most 1,048,576 bytes, .* but has 274,877,906,944"
    with pytest.raises(TooLargeError, match=message):
        read_folder(sparse, at_most)
    with pytest.raises(CheckpointError, match=f"step-000000000007: {message}"):
        RunDirectory(tmp_path).newest(dict, at_most)


@promise("nothing-lost.15")
@pytest.mark.parametrize("make", [lambda path: path.symlink_to("outside"), os.mkfifo, os.mkdir])
def test_links_and_pipes_are_not_followed(damaged, make):
    (damaged / "run.json").rename(damaged / "outside")
    make(damaged / "run.json")
    with pytest.raises(CheckpointError, match=r"run\.json must be a"):
        check_folder(damaged)


def in_chunks(data):
    yield data[:7]
    yield memoryview(data)[7:7]
    yield memoryview(data)[7:]


def test_chunks_make_the_same_folder(whole, tmp_path, monkeypatch):
    monkeypatch.setattr(folder, "CHUNK_BYTES", 5)
    path = tmp_path / "step-000000000001"
    write_folder(path, {name: in_chunks(data) for name, data in CONTENTS.items()})
    for name in (*FILES, COMMIT):
        assert (path / name).read_bytes() == (whole / name).read_bytes()


def test_what_fails_in_the_middle_of_a_file_leaves_nothing_behind(tmp_path):
    def chunks():
        yield b"some"
        raise ValueError("no more")

    with pytest.raises(ValueError, match="no more"):
        write_folder(tmp_path / "step", CONTENTS | {FILES[1]: chunks()})
    with pytest.raises(KeyError):
        write_folder(tmp_path / "step", {FILES[0]: b""})
    assert os.listdir(tmp_path) == []


LARGE = {name: [bytes(range(250)) * 1200] * 7 + [b"small"] * 3 for name in FILES}


def test_files_of_many_pieces_have_the_sha256_of_all(tmp_path, monkeypatch):
    monkeypatch.setattr(folder, "_SPAN_BYTES", 500_000)
    write_folder(tmp_path / "step", LARGE)
    said = json.loads((tmp_path / "step" / COMMIT).read_bytes())
    for name in FILES:
        whole = b"".join(LARGE[name])
        assert (tmp_path / "step" / name).read_bytes() == whole
        assert said[name] == {"bytes": len(whole), "sha256": hashlib.sha256(whole).hexdigest()}
    assert contents(read_folder(tmp_path / "step")) == {n: b"".join(LARGE[n]) for n in FILES}


def test_without_another_thread_files_are_hashed_all_the_same(tmp_path, monkeypatch):
    def start(thread):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr("threading.Thread.start", start)
    write_folder(tmp_path / "step", LARGE)
    assert check_folder(tmp_path / "step") == {n: sum(map(len, LARGE[n])) for n in FILES}


def test_bytes_that_cannot_be_hashed_leave_nothing_behind(tmp_path, monkeypatch):
    class Broken:
        def update(self, data):
            raise MemoryError("no room to hash")

    monkeypatch.setattr("hashlib.sha256", Broken)
    with pytest.raises(MemoryError, match="no room to hash"):
        write_folder(tmp_path / "step", LARGE)
    assert os.listdir(tmp_path) == []


def test_a_checkpoint_is_written_after_the_programs_end(tmp_path):
    program = """
import sys, threading
from pathlib import Path
from unisono.runtime.checkpoint.folder import FILES, write_folder

def write():
    threading.main_thread().join()
    write_folder(Path(sys.argv[1]), {name: [bytes(1 << 20)] * 40 for name in FILES})

threading.Thread(target=write).start()
"""
    path = tmp_path / "step-000000000001"
    subprocess.run([sys.executable, "-c", program, path], check=True)
    assert check_folder(path) == dict.fromkeys(FILES, 40 << 20)


def test_a_disk_that_ends_in_the_middle_of_a_file_leaves_nothing_behind(tmp_path):
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    store = RunDirectory(tmp_path)
    store.write(1, CONTENTS)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, limits[1]))
        with pytest.raises(OSError, match="File too large"):
            store.write(2, CONTENTS | {FILES[1]: [bytes(700_000)] * 2})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert os.listdir(store.folder) == ["step-000000000001"]
    assert [store.has(step) for step in (1, 2)] == [True, False]


def test_only_a_folder_under_its_last_name_is_had(tmp_path):
    store = RunDirectory(tmp_path)
    assert not store.has(1)
    store.write(1, CONTENTS)
    (store.folder / ".step-000000000002.1.part").mkdir()
    (store.folder / "step-000000000003").write_bytes(b"")
    (store.folder / "step-000000000004").symlink_to(store.folder / "step-000000000001")
    assert [store.has(step) for step in range(6)] == [False, True, *[False] * 4]
    store.set_aside(0)
    assert not store.has(1)


def test_only_the_newest_stay_and_the_newest_whole_one_is_read(tmp_path):
    store = RunDirectory(tmp_path, keep=3)
    for step in range(1, 6):
        store.write(step, CONTENTS)
    (store.folder / ".step-000000000006.1.part").mkdir()
    (store.folder / "step-000000000005" / "run.json").write_bytes(b"{")
    assert [entry.step for entry in store.entries()] == [5, 4, 3]
    read, entry, passed_over = store.newest(contents)
    assert (read, entry.step) == (CONTENTS, 4)
    assert [(other.step, "must have" in other.trouble) for other in passed_over] == [(5, True)]
    assert store.set_aside(4) == ["step-000000000005"]
    store.write(5, CONTENTS)
    names = [f"step-{step:012}" for step in (3, 4, 5)]
    assert sorted(os.listdir(store.folder)) == ["aside-1-step-000000000005", *names]
    assert store.set_aside(4) == ["step-000000000005"]
    assert "aside-2-step-000000000005" in os.listdir(store.folder)


def test_a_checkpoint_that_is_removed_meanwhile_is_not_called_damaged(tmp_path, monkeypatch):
    store = RunDirectory(tmp_path, keep=1)
    store.write(1, CONTENTS)

    def stopped(path, **_):  # in the midst of a removal
        (path / COMMIT).unlink(missing_ok=True)

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", stopped)
        store.write(2, CONTENTS)
    assert [entry.step for entry in store.entries()] == [2]

    def removed(path):
        shutil.rmtree(path)
        return check_folder(path)

    monkeypatch.setattr(run_directory, "check_folder", removed)
    assert store.entries() == []


def test_without_a_folder_there_are_no_checkpoints(tmp_path):
    assert RunDirectory(tmp_path / "none").entries() == []
    assert RunDirectory(tmp_path / "none").newest(dict) == (None, None, [])


def test_a_link_in_place_of_the_folder_of_checkpoints_is_refused(tmp_path):
    RunDirectory(tmp_path / "other").write(3, CONTENTS)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "checkpoints").symlink_to(tmp_path / "other" / "checkpoints")
    store = RunDirectory(tmp_path / "mine", keep=1)
    for act in (store.entries, lambda: store.set_aside(0), lambda: store.write(4, CONTENTS)):
        with pytest.raises(CheckpointError, match="must be a folder, but is a link"):
            act()
    assert [entry.step for entry in RunDirectory(tmp_path / "other").entries()] == [3]


def make(dtype=torch.float32):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2)).to(dtype)
    optimizer = torch.optim.Adam(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return model, optimizer


def test_equal_states_have_equal_digests():
    assert digest_of(*make()) == digest_of(*make())


def test_every_kind_of_state_counts():
    digests = {digest_of(*make()), digest_of(*make(torch.float64))}
    model, optimizer = make()
    model[0].weight.data[0, 0] += 1e-6
    digests.add(digest_of(model, optimizer))
    model, optimizer = make()
    model[1].num_batches_tracked += 1
    digests.add(digest_of(model, optimizer))
    for key in ("step", "exp_avg", "exp_avg_sq"):
        model, optimizer = make()
        optimizer.state[model[0].bias][key] += 1
        digests.add(digest_of(model, optimizer))
    for added in (0, 1):
        model, optimizer = make()
        optimizer.state[model[0].bias]["past"] = [{"a": torch.zeros(2) + added}]
        digests.add(digest_of(model, optimizer))
        model, optimizer = make()
        optimizer.state["k"] = torch.tensor([added])
        digests.add(digest_of(model, optimizer))
    assert len(digests) == 11


def test_the_layout_in_memory_does_not_count():
    model, optimizer = make()
    before = digest_of(model, optimizer)
    model[0].weight.data = model[0].weight.data.t().contiguous().t()
    assert digest_of(model, optimizer) == before


def test_what_may_not_be_read_is_not_taken_for_damaged(tmp_path, monkeypatch):
    store = RunDirectory(tmp_path, 3)
    for step in (1, 2):
        store.write(step, CONTENTS)
    opened = folder.open_in

    def refuse(at, path, flags):
        if os.readlink(f"/proc/self/fd/{at}").endswith("2") and path.name == FILES[0]:
            raise PermissionError(errno.EACCES, "Permission denied")
        return opened(at, path, flags)

    monkeypatch.setattr(folder, "open_in", refuse)
    with pytest.raises(CheckpointError, match=r"step-0+2 in .* must be readable for you"):
        store.newest(contents)
    monkeypatch.undo()
    assert store.newest(contents)[1].step == 2  # it is still there
