"""A run directory at a URL: what is whole there, whose it is, and what a folder here is worth."""

from __future__ import annotations

import json
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import fsspec
import pytest
import torch
from fsspec.implementations.local import LocalFileSystem

import unisono
from unisono.errors import CheckpointError
from unisono.runtime.checkpoint import remote, remote_copy, remote_process
from unisono.runtime.checkpoint.folder import FILES, MODEL_FILE
from unisono.runtime.checkpoint.remote_copy import Copy, TakenError
from unisono.runtime.checkpoint.remote_process import Keeper
from unisono.runtime.checkpoint.run_directory import ENDED, RunDirectory, name_of
from unisono.runtime.signals import ENDING_SIGNALS
from unisono.tools.report.files import write_report


class Store(LocalFileSystem):  # type: ignore[misc]
    """A folder whose calls fail as a test wishes."""

    protocol = "store"
    trouble: ClassVar[Callable[[str], None]] = lambda path: None

    def __init__(self, **options: Any) -> None:
        super().__init__(**{**options, "skip_instance_cache": True})

    @classmethod
    def _strip_protocol(cls, path: Any) -> str:
        return str(super()._strip_protocol(str(path).removeprefix("store://")))

    def ls(self, path: str, detail: bool = False, **options: Any) -> Any:
        type(self).trouble(path)
        return sorted(super().ls(path, detail, **options), key=str)[::-1]

    def pipe_file(self, path: str, value: bytes, **options: Any) -> None:
        type(self).trouble(path)
        super().pipe_file(path, value, **options)

    def put_file(self, path: str, there: str, **options: Any) -> None:
        type(self).trouble(there)
        super().put_file(path, there, **options)

    def _open(self, path: str, mode: str = "rb", **options: Any) -> Any:
        if "r" in mode:
            type(self).trouble(path)
        return super()._open(path, mode, **options)


fsspec.register_implementation("store", Store, clobber=True)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for module in (remote_copy, remote_process):
        for name, value in (("LEASE_S", 0.4), ("SETTLE_S", 0.01), ("PAUSE_S", 0.02)):
            monkeypatch.setattr(module, name, value, raising=False)
    monkeypatch.setattr(remote_process, "LOOK_S", 0.02)
    yield
    Store.trouble = lambda path: None


class Machine:
    """A local folder, and the jobs that begin with it."""

    def __init__(self, root: Path, name: str) -> None:
        self.folder, self._there = root / name, root / "there"
        self.runs = RunDirectory(self.folder, keep=2)
        self.folder.mkdir(exist_ok=True)

    def work(self, session: str, **changes: Any) -> dict[str, Any]:
        work = {"url": f"store://{self._there}", "folder": str(self.folder), "session": session}
        facts = {"pid": os.getpid(), "owns": True, "resumes": True, "keep": 2, "at_most": {}}
        return {**work, **facts, "timeout_s": 5.0, **changes}

    def begin(self, session: str, **changes: Any) -> Copy:
        copy = Copy(self.work(session, **changes))
        copy.open()
        return copy

    def write(self, step: int, what: bytes = b"", end: str = "") -> None:
        self.runs.write(step, dict.fromkeys(FILES, b"%d %s" % (step, what)))
        if end:
            self.runs.mark_end(step, end)
        (self.folder / "events.jsonl").write_text(f"{step}\n")

    def steps(self) -> list[int]:
        return sorted(self.runs.ends())

    def model(self, step: int) -> bytes:
        return (self.runs.path_of(step) / MODEL_FILE).read_bytes()


@pytest.fixture
def one(tmp_path: Path) -> Machine:
    return Machine(tmp_path, "one")


@pytest.fixture
def other(tmp_path: Path) -> Machine:
    return Machine(tmp_path, "other")


@pytest.fixture
def there(tmp_path: Path) -> Path:
    return tmp_path / "there"


def test_another_machine_goes_on_with_the_newest_and_the_ends_of_loops(
    one: Machine, other: Machine
) -> None:
    copy = one.begin("first")
    for step in range(1, 6):
        one.write(step, end=ENDED + "loop 1" if step == 1 else "")
        copy.round(is_last=step == 5)
    shutil.rmtree(one.folder)
    other.begin("second")
    assert other.steps() == [1, 5]
    assert other.runs.end_of("loop 1", 5) == other.runs.path_of(1)
    assert (other.folder / "events.jsonl").read_text() == "5\n"


def test_older_ones_are_removed_once_a_newer_one_is_whole(one: Machine, there: Path) -> None:
    copy = one.begin("first")
    for step in (1, 2):
        one.write(step)
        copy.round(is_last=False)
    one.write(3)

    def full(path: str) -> None:
        if "commit" in path and name_of(3) in path:
            raise OSError("full")

    Store.trouble = full
    with pytest.raises(OSError, match="full"):
        copy.round(is_last=False)
    whole = there.glob("checkpoints/*/commit.json")
    assert sorted(path.parent.name for path in whole) == [name_of(1), name_of(2)]
    Store.trouble = lambda path: None
    copy.round(is_last=False)
    assert sorted(os.listdir(there / "checkpoints")) == [name_of(2), name_of(3)]


@pytest.mark.parametrize("damage", ["half", "missing", "longer", "changed", "half a commit file"])
def test_what_is_not_whole_is_passed_over(
    one: Machine, other: Machine, there: Path, damage: str, capfd: pytest.CaptureFixture[str]
) -> None:
    copy = one.begin("first")
    for step in (1, 2):
        one.write(step)
        copy.round(is_last=step == 2)
    model = there / "checkpoints" / name_of(2) / MODEL_FILE
    if damage == "missing":
        model.unlink()
    elif damage == "half a commit file":
        model.with_name("commit.json").write_text('{"model')
    else:
        model.write_bytes({"half": b"2", "longer": b"2 more", "changed": b"3 "}[damage])
    copy = other.begin("second")
    assert other.steps() == [1]
    assert ("passed over" in capfd.readouterr().err) == (damage != "half a commit file")
    other.write(2)  # and then it is there as it was to be
    copy.round(is_last=True)
    assert model.read_bytes() == b"2 "


def test_the_folder_that_was_there_last_goes_on_with_what_was_not_copied(one: Machine) -> None:
    one.begin("first")
    one.write(7)
    copy = one.begin("second")
    assert one.steps() == [7]
    copy.round(is_last=True)
    assert not copy.missing()


def test_on_each_host_a_folder_goes_on_with_what_was_not_copied(
    one: Machine, other: Machine
) -> None:
    """Hosts that did not own the URL set it aside, so all went back to what the URL had."""
    copy = one.begin("first")
    other.begin("first, on another host", owns=False)
    for step in (1, 7):
        one.write(step)
        other.write(step)
        if step == 1:  # the job is killed before it has copied step 7
            copy.round(is_last=False)
    one.begin("second")
    other.begin("second, on another host", owns=False)
    assert one.steps() == other.steps() == [1, 7]
    Machine(one.folder.parent, "elsewhere").begin("third")
    one.begin("fourth")
    other.begin("fourth, on another host", owns=False)
    assert one.steps() == other.steps() == [1], "the run has continued elsewhere"


def test_a_folder_whose_run_went_on_elsewhere_is_set_aside(
    one: Machine, other: Machine, capfd: pytest.CaptureFixture[str]
) -> None:
    first = one.begin("first")
    one.write(1)
    first.round(is_last=True)
    second = other.begin("second")
    one.write(9, b"of another past")
    other.write(2, b"other")
    second.round(is_last=True)
    with pytest.raises(TakenError):
        first.round(is_last=True)
    one.begin("third")
    assert one.steps() == [1, 2]
    assert one.model(2) == b"2 other"
    assert "has checkpoints of step 9 that do not belong to the run" in capfd.readouterr().err


def test_a_signal_to_all_processes_of_a_job_ends_no_copying(one: Machine, there: Path) -> None:
    work = one.work("first", url=f"file://{there}")
    remote.start_copying(str(one.folder), work)
    process = remote._processes[str(one.folder)]
    for signum in ENDING_SIGNALS:  # while it begins, too
        process.send_signal(signum)
    remote.await_answer(one.folder, work)
    for signum in (*ENDING_SIGNALS, signal.SIGHUP):
        process.send_signal(signum)
    one.write(7)
    remote.finish_copying()
    assert (there / "checkpoints" / name_of(7) / "commit.json").exists()


def test_what_the_run_has_gone_back_behind_is_removed_there(
    one: Machine, other: Machine, there: Path
) -> None:
    copy = one.begin("first", resumes=False)
    for step in (5, 6):
        one.write(step)
        copy.round(is_last=step == 6)
    with pytest.raises(CheckpointError, match=r"checkpoints of steps 5, 6: "):
        other.begin("second", resumes=False)
    back = one.begin("third")
    one.runs.set_aside(0)  # hosts that share no folder go back to the newest that all have
    back.round(is_last=False)
    assert len(list(there.glob("checkpoints/step-*"))) == 2
    one.write(3)
    back.round(is_last=True)
    assert [path.name for path in there.glob("checkpoints/step-*")] == [name_of(3)]


def test_a_link_in_place_of_the_copy_of_a_file_is_not_followed(
    one: Machine, there: Path, tmp_path: Path
) -> None:
    copy = one.begin("first")
    one.write(1)
    (tmp_path / "outside").write_text("precious")
    (one.folder / ".remote-file").symlink_to(tmp_path / "outside")
    copy.round(is_last=False)
    assert (tmp_path / "outside").read_text() == "precious"
    assert (there / "events.jsonl").read_text() == "1\n"


def test_checkpoints_are_copied_even_if_other_files_cannot_be(one: Machine, there: Path) -> None:
    copy = one.begin("first")
    one.write(1)
    (one.folder / ".remote-file").mkdir()  # fails as a full local disk would
    with pytest.raises(IsADirectoryError):
        copy.round(is_last=True)
    assert (there / "checkpoints" / name_of(1) / "commit.json").exists()
    assert copy.missing() == "events.jsonl"
    (one.folder / ".remote-file").rmdir()
    copy.round(is_last=True)
    assert not copy.missing()


def test_a_job_that_stood_still_removes_nothing_of_the_next_one(
    one: Machine, other: Machine, there: Path
) -> None:
    """It removed all steps that it did not know: those of the job that had taken over."""
    first = one.begin("first", pid=os.getppid())
    for step in (1, 2):
        one.write(step)
        first.round(is_last=False)
    one.write(3)

    def stand_still(path: str) -> None:
        if name_of(3) in path and "commit" in path:
            Store.trouble = lambda path: None
            second = other.begin("second")
            for step in (7, 8):
                other.write(step)
                second.round(is_last=False)

    Store.trouble = stand_still
    with pytest.raises(TakenError):
        first.round(is_last=False)
    assert {name_of(7), name_of(8)} <= set(os.listdir(there / "checkpoints"))


def test_a_second_job_is_refused_as_long_as_the_first_gives_signs_of_life(
    one: Machine, other: Machine, there: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    first = one.begin("first", pid=os.getppid())
    ended = threading.Event()

    def live() -> None:
        while not ended.wait(0.05):
            first.beat()

    thread = threading.Thread(target=live)
    thread.start()
    try:
        with pytest.raises(CheckpointError, match=f"in use by process {os.getppid()} on "):
            other.begin("second")
    finally:
        ended.set()
        thread.join()
    assert other.begin("third", pid=os.getpid()).round(is_last=False) is None  # silent for too long
    with pytest.raises(TakenError):
        first.beat()
    owner = json.loads((there / "owner.json").read_text())
    begun_s = time.monotonic()
    (there / "owner.json").write_text(json.dumps({**owner, "pid": os.getppid(), "started": 1}))
    other.begin("fourth")  # that process has ended, on this machine
    assert time.monotonic() - begun_s < 0.4 or "waiting up to" not in capfd.readouterr().err


@pytest.mark.parametrize("moment", ["_found_there", "_read_owner"])
def test_of_two_jobs_that_begin_at_once_one_is_refused(
    one: Machine, other: Machine, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    """Both were accepted if one claimed the URL while the other looked at what is there."""
    begun: list[Copy] = []
    first = Copy(one.work("first"))
    look = getattr(first, moment)

    def interrupted() -> Any:
        found = look()
        if not begun:
            begun.append(other.begin("second", pid=os.getppid()))
        return found

    monkeypatch.setattr(first, moment, interrupted)
    with pytest.raises(CheckpointError, match=f"in use by process {os.getppid()} on "):
        first.open()
    other.write(1)
    begun[0].round(is_last=True)
    assert not begun[0].missing()


@pytest.mark.parametrize(
    ("commit", "refused"),
    [
        ({"../../x": {"bytes": 1, "sha256": ""}}, False),
        ({name: {"bytes": 1 << 50, "sha256": ""} for name in FILES}, True),
        ({name: {"bytes": -1, "sha256": ""} for name in FILES}, False),
    ],
)
def test_nothing_there_is_trusted(
    one: Machine, there: Path, tmp_path: Path, commit: dict[str, Any], refused: bool
) -> None:
    folder = there / "checkpoints" / name_of(4)
    folder.mkdir(parents=True)
    (folder / "commit.json").write_text(json.dumps(commit))
    (there / ".hidden").write_text("")
    (there / "aside-1-x").write_text("")
    os.symlink("/etc", there / "checkpoints" / "step-..")
    before = sorted(os.listdir(tmp_path))
    if refused:
        with pytest.raises(CheckpointError, match="must have at most 1,000 bytes"):
            one.begin("first", at_most={MODEL_FILE: 1000})
    else:
        one.begin("first")
    assert one.steps() == []
    assert sorted(os.listdir(tmp_path)) == before
    assert os.listdir(one.folder) == [".remote.json"]


def test_a_store_that_is_lost_is_told_once_and_tried_again(
    one: Machine, there: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    keeper = Keeper(one.work("first"))
    failures = iter([True] * 3)

    def gone(path: str) -> None:
        if next(failures, False):
            raise ConnectionError("no route to password://u:geheim@x")

    Store.trouble = gone
    assert keeper.open() == ""
    assert keeper.copied is not None
    failures = iter([True] * 3)
    one.write(1)
    keeper._ends.set()
    keeper.copy(keeper.copied)
    told = capfd.readouterr().err
    assert told.count("cannot be reached") == told.count("cannot be written") == 1
    assert told.count("can be reached again") == 1
    assert "geheim" not in told
    assert (there / "checkpoints" / name_of(1) / "commit.json").exists()


@pytest.mark.parametrize("error", [PermissionError("403"), RuntimeError("NoCredentialsError")])
def test_what_no_second_try_changes_is_refused_at_once(one: Machine, error: Exception) -> None:
    def refuse(path: str) -> None:
        raise error

    Store.trouble = refuse
    told = Keeper(one.work("first")).open()
    assert told.startswith("`directory` must be a URL that can be read and written")
    assert "memory" in Keeper(one.work("first", url="memory://x")).open()


def test_secrets_are_not_shown(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "abcdefgh/1234")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    url = "ftp://me:ge%20heim@host/run?sig=1234567&version=2"
    told = remote.masked(f"ge heim, 1234567, abcdefgh/1234, step 20: {url}", url)
    assert told == "***, ***, ***, step 20: ftp://me@host/run"
    folder = remote.local_folder(url)
    assert folder == remote.local_folder("ftp://me:other@host/run/")
    assert folder.parent == tmp_path / "unisono"
    assert folder.name.startswith("run-")
    with pytest.raises(ValueError, match=f"ftp://me@host/run is a URL: pass {folder}"):
        unisono.load_weights(url, torch.nn.Linear(1, 1))
    with pytest.raises(ValueError, match="DIRECTORY must be a run's folder, but is a URL"):
        write_report(url)
    with pytest.raises(ValueError, match="must be a text if it is a URL"):
        remote.url_of(Path("s3://bucket/run"))
