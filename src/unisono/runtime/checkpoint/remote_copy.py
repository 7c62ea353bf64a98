"""What a local folder and a URL have of a run, which of them counts, and what to copy.

::

    s3://bucket/run/
      owner.json               the job that copies there: its session, the one before, its beat
      events.jsonl, …          the plain files of the run directory
      checkpoints/step-…/      the three files, end-of-loop, and then commit.json

A checkpoint at the URL counts if its commit file is complete and correct. A local folder continues
the run at the URL if it knows the last session there. Otherwise the run has continued elsewhere:
the URL counts, and what only the folder has is set aside. Nothing at the URL is ever set aside, so
a run that must start from scratch is rejected if the URL has checkpoints.

Only files with these names are read from the URL, and no more bytes than the commit file states.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, final

from unisono.errors import CheckpointError, NotPlainFileError
from unisono.runtime.checkpoint import folder as files
from unisono.runtime.checkpoint.remote import LEASE_S, masked
from unisono.runtime.checkpoint.run_directory import (
    END_MARK,
    RunDirectory,
    ends_at_most,
    name_of,
    outdated,
    rename_aside,
    step_of,
)
from unisono.runtime.notices import listed, say
from unisono.runtime.plainfile import check_plain, open_plain, written_whole
from unisono.runtime.procfs import host_name, started_at

OWNER, NOTE, CHECKPOINTS = "owner.json", ".remote.json", "checkpoints"
BEAT_S, SETTLE_S, PAUSE_S = 15.0, 0.5, 2.0
_SMALL_BYTES, _CHUNK_BYTES, _FILE_BYTES_AT_MOST = 1 << 16, 4 << 20, 1 << 34
_FILE = re.compile(r"(?!owner\.json$|aside-)[A-Za-z0-9][\w.-]{0,99}", re.ASCII)
_Stored = tuple[bytes, str]  # of a checkpoint: its commit file, and which loop ended with it


@final
class TakenError(Exception):
    """Another job copies to the URL now."""


@final
class Copy:
    """A local folder and its URL."""

    def __init__(self, work: dict[str, Any]) -> None:
        self._work, self._folder = work, Path(work["folder"])
        self.place = masked(work["url"])
        self._local = RunDirectory(self._folder, work["keep"])
        self._remote = RemoteFiles(work["url"])
        self._there: dict[int, _Stored] = {}
        self._ours: set[int] = set()  # steps whose folders there were found at first, or put there
        self._copied: dict[str, tuple[int, int]] = {}  # other files, as they were when copied
        self._owner: dict[str, Any] = {}
        self._beating = threading.Lock()

    def open(self) -> None:
        """Update the local folder from the URL, and become the URL's owner if it is to be copied.

        On hosts other than the owner's, the owner is there first. Raises a CheckpointError if
        another job owns the URL, or its contents cannot be used.
        """
        owns = self._work["owns"]
        owner = self._left() if owns else self._read_owner()
        before, session = owner.get("before"), owner.get("session")
        if owns:
            before, session = session, self._work["session"]
        known: list[Any] = []  # the sessions that the local folder knows
        with suppress(OSError, NotPlainFileError, TypeError, ValueError, RecursionError):
            known += json.loads(_read(self._folder / NOTE))
        is_continued = before in known
        self._ours = set(self._steps_there())
        self._there = self._found_there()
        if self._work["resumes"]:
            if not is_continued:
                self._set_aside_here()
        elif self._there:
            raise CheckpointError(
                f'`Checkpoint(resume="never")` needs a URL without checkpoints, but {self.place} '
                f"has checkpoints of {listed('step', sorted(self._there))}: pass another URL, or "
                f"remove them."
            )
        known = [*(known if is_continued else []), session]
        with written_whole(self._folder / NOTE) as file:
            file.write(json.dumps(known).encode())
        if owns:
            self._claim(before)
        if self._work["resumes"]:
            self._fetch()
        else:
            self._local.set_aside(-1)

    def round(self, *, is_last: bool) -> None:
        """Copy what is new, remove what is outdated; a TakenError if the URL has a new owner."""
        here = self._here()
        new = [step for step in sorted(here, reverse=True) if self._there.get(step) != here[step]]
        if new or is_last:
            self.beat()
        try:
            if new or is_last:
                self._put_files()  # before the checkpoint that they belong to
        finally:  # a full local disk has no room for these files' copy, but has the checkpoints
            for step in new:
                self._put(step, *here[step])
            if new:
                self._remove_outdated(max(here))
        if is_last:
            self.beat(has_left=True)

    def missing(self) -> str:
        """Describe what has not been copied; empty if all has been."""
        steps = [step for step, one in self._here().items() if self._there.get(step) != one]
        what = [f"the checkpoints of {listed('step', steps)}"] if steps else []
        what += [name for name, seen in self._files().items() if self._copied.get(name) != seen]
        return ", ".join(what)

    def beat(self, **facts: Any) -> None:
        """Update the beat in the owner file, as a sign of life."""
        with self._beating:
            there = self._read_owner()
            if there.get("session", self._owner["session"]) != self._owner["session"]:
                raise TakenError
            self._owner |= {"beat": self._owner["beat"] + 1, **facts}
            self._remote.write(OWNER, json.dumps(self._owner).encode())

    def keep_beating(self, is_over: threading.Event) -> None:
        """Update the beat regularly, even while a large file is copied."""
        while not is_over.wait(BEAT_S):
            with suppress(Exception):  # `round` reports what is wrong
                self.beat()

    def _left(self) -> dict[str, Any]:
        """Return the previous owner once its job has left or is dead; raise if it is alive."""
        first, until_s = self._read_owner(), time.monotonic() + LEASE_S
        if not self._is_over(first):
            say(
                f"{self.place} was in use by {_named(first)}: waiting up to {LEASE_S:.0f} s for a "
                f"sign of life"
            )
            while time.monotonic() < until_s and not self._is_over(now := self._read_owner()):
                if now != first:
                    raise self._in_use(now)
                time.sleep(min(PAUSE_S, LEASE_S / 4))
        return first

    def _is_over(self, owner: dict[str, Any]) -> bool:
        """Return whether an owner's job has left, has died on this machine, or is this job."""
        pid = owner.get("pid")
        if not owner or owner.get("has_left"):
            return True
        if owner.get("host") != host_name() or type(pid) is not int:
            return False
        return pid == self._work["pid"] or started_at(pid) != owner.get("started")

    def _claim(self, before: object) -> None:
        """Become the owner after session `before`; raise if another job does so at that time."""
        pid, session = self._work["pid"], self._work["session"]
        process = {"host": host_name(), "pid": pid, "started": started_at(pid)}
        facts = {"session": session, "before": before, "name": os.uname().nodename}
        self._owner = {**facts, **process, "beat": 0}
        start_s = time.monotonic()
        if (there := self._read_owner()).get("session") == before:
            self._remote.write(OWNER, json.dumps(self._owner).encode())
            # Of two jobs that write at once, the later overwrites the other.
            time.sleep(max(SETTLE_S, 2 * (time.monotonic() - start_s)))
            there = self._read_owner()
        if there.get("session") != session:
            raise self._in_use(there)

    def _in_use(self, owner: dict[str, Any]) -> CheckpointError:
        return CheckpointError(
            f"a run directory must belong to one job at a time, but {self.place} is in use by "
            f"{_named(owner)}: wait until that has ended, or pass another `directory`."
        )

    def _read_owner(self) -> dict[str, Any]:
        with suppress(ValueError, RecursionError):
            owner = json.loads(self._remote.read(OWNER))
            return owner if isinstance(owner, dict) else {}
        return {}

    def _steps_there(self) -> list[int]:
        named = map(step_of, self._remote.names(CHECKPOINTS, "directory"))
        return [step for step in named if step is not None]

    def _found_there(self) -> dict[int, _Stored]:
        """Return the checkpoints at the URL whose commit file is complete."""
        found = {}
        for step in self._steps_there():
            with suppress(CheckpointError):
                files.parse_commit(commit := self._remote.read(_in(step, files.COMMIT)))
                end = self._remote.read(_in(step, END_MARK)).decode(errors="replace")
                found[step] = commit, end
        return found

    def _here(self) -> dict[int, _Stored]:
        here = {}
        for step, end in self._local.ends().items():
            with suppress(OSError, NotPlainFileError):  # it has just been removed
                here[step] = _read(self._local.path_of(step) / files.COMMIT), end
        return here

    def _files(self) -> dict[str, tuple[int, int]]:
        """Return the local folder's other plain files, with their modification time and size."""
        found = {}
        for one in os.scandir(self._folder):
            if _FILE.fullmatch(one.name) and one.is_file(follow_symlinks=False):
                with suppress(FileNotFoundError):
                    found[one.name] = one.stat().st_mtime_ns, one.stat().st_size
        return found

    def _set_aside_here(self) -> None:
        others = [step for step, one in self._here().items() if self._there.get(step) != one]
        for path in [*map(self._local.path_of, others), *map(self._folder.joinpath, self._files())]:
            rename_aside(path)
        if others:
            say(
                f"{self._folder} has checkpoints of {listed('step', others)} that do not belong to "
                f"the run at {self.place}: they are moved aside"
            )

    def _fetch(self) -> None:
        """Fetch the newest checkpoint unless it is local, and the ends of earlier loops."""
        newest = next(filter(self._is_whole, sorted(self._local.ends(), reverse=True)), -1)
        for step in sorted(self._there, reverse=True):
            if step <= newest or self._download(step):
                newest = max(step, newest)
                break
        for step, (_, end) in list(self._there.items()):
            if end and step < newest and not self._local.has(step):
                self._download(step)
        if self._work["owns"]:
            for name in self._remote.names("", "file"):
                if _FILE.fullmatch(name) and not (self._folder / name).exists():
                    with written_whole(self._folder / name) as file:
                        file.writelines(self._remote.chunks(name, _FILE_BYTES_AT_MOST))

    def _is_whole(self, step: int) -> bool:
        with suppress(CheckpointError):
            return bool(files.check_folder(self._local.path_of(step)))
        return False

    def _download(self, step: int) -> bool:
        """Fetch a checkpoint; return False if it does not match its commit file."""
        (commit, end), path = self._there[step], self._local.path_of(step)
        facts, at_most = files.parse_commit(commit), self._work["at_most"]
        for name, fact in facts.items():
            files.check_size(name, fact["bytes"], at_most.get(name, fact["bytes"]))
        if path.exists():  # damaged
            rename_aside(path)
        try:
            contents = {name: self._checked(step, name, fact) for name, fact in facts.items()}
            files.write_folder(path, contents)
        except CheckpointError as error:
            say(f"checkpoint {path.name} at {self.place} is passed over: {error}")
            del self._there[step]
            return False
        if end:
            self._local.mark_end(step, end)
        say(f"checkpoint {path.name} was fetched from {self.place}")
        return True

    def _checked(self, step: int, name: str, fact: dict[str, Any]) -> Iterator[bytes]:
        digest, num_bytes = hashlib.sha256(), 0
        with suppress(FileNotFoundError):
            for chunk in self._remote.chunks(_in(step, name), fact["bytes"]):
                digest.update(chunk)
                num_bytes += len(chunk)
                yield chunk
        if (num_bytes, digest.hexdigest()) != (fact["bytes"], fact["sha256"]):
            raise CheckpointError(f"{name} does not match its checksum in commit.json.")

    def _put_files(self) -> None:
        copy = self._folder / ".remote-file"
        try:
            for name, seen in self._files().items():
                if self._copied.get(name) != seen:
                    copy.unlink(missing_ok=True)  # a link would lead out of the folder
                    fd = open_plain(self._folder / name, os.O_RDONLY)
                    with os.fdopen(fd, "rb") as file, copy.open("xb") as beside:
                        shutil.copyfileobj(file, beside)  # the run may truncate it meanwhile
                    self._remote.write(name, copy)
                    self._copied[name] = seen
        finally:
            copy.unlink(missing_ok=True)

    def _put(self, step: int, commit: bytes, end: str) -> None:
        """Copy a checkpoint, with its commit file last."""
        path = self._local.path_of(step)
        is_new = self._there.get(step, (b"", ""))[0] != commit
        self._ours.add(step)
        try:
            if is_new and step in self._there:
                del self._there[step]
                self._remote.remove(_in(step, files.COMMIT))
            for name in files.FILES if is_new else ():
                self._remote.write(_in(step, name), path / name)
            if end:
                self._remote.write(_in(step, END_MARK), end.encode())
            else:
                self._remote.remove(_in(step, END_MARK))
            self.beat()  # another job may have taken the URL
            if is_new:
                self._remote.write(_in(step, files.COMMIT), commit)
            self._there[step] = commit, end
        except FileNotFoundError:
            if all((path / name).exists() for name in files.FILES):
                raise  # otherwise it is being removed locally

    def _remove_outdated(self, newest: int) -> None:
        """Remove checkpoints that are outdated, incomplete, or newer than the run's newest.

        A job that stood still for long may have lost the URL: it must not remove a new owner's.
        """
        ends = {step: end for step, (_, end) in self._there.items() if step <= newest}
        num_ends = ends_at_most(self._local.path_of(newest))
        wanted = ends.keys() - outdated(ends, self._work["keep"], num_ends)
        for step in sorted(self._ours - wanted):
            self.beat()
            self._there.pop(step, None)
            self._remote.remove(_in(step, files.COMMIT))
            self._remote.remove(_in(step, ""))
            self._ours.remove(step)


def _named(owner: dict[str, Any]) -> str:
    return f"process {owner.get('pid')} on {owner.get('name')}"


def _in(step: int, name: str) -> str:
    return f"{CHECKPOINTS}/{name_of(step)}/{name}"


def _read(path: Path) -> bytes:
    with os.fdopen(open_plain(path, os.O_RDONLY), "rb") as file:
        return file.read(_SMALL_BYTES)


@final
class RemoteFiles:
    """The files below a URL, by their names there."""

    def __init__(self, url: str) -> None:
        from fsspec.core import url_to_fs

        if url.startswith("memory:"):
            raise ValueError("what is in the memory of a process ends with it")
        self._fs, self._root = url_to_fs(url, skip_instance_cache=True)

    def _at(self, name: str) -> str:
        self._fs.invalidate_cache()  # other jobs write there too
        return f"{self._root.rstrip('/')}/{name}".rstrip("/")

    def chunks(self, name: str, at_most: int) -> Iterator[bytes]:
        """Yield a file in chunks, at most one byte more than `at_most`."""
        rest = at_most + 1
        with self._fs.open(self._at(name), "rb") as file:
            while rest > 0 and (chunk := file.read(min(rest, _CHUNK_BYTES))):
                rest -= len(chunk)
                yield chunk

    def read(self, name: str) -> bytes:
        """Return a small file; empty if there is none."""
        with suppress(FileNotFoundError):
            return b"".join(self.chunks(name, _SMALL_BYTES))
        return b""

    def write(self, name: str, data: bytes | Path) -> None:
        """Write bytes or a local file to a file; create its folder if necessary."""
        path = self._at(name)

        def write() -> None:
            if isinstance(data, Path):
                check_plain(data)
                self._fs.put_file(str(data), path)
            else:
                self._fs.pipe_file(path, data)

        try:
            write()
        except FileNotFoundError:
            bucket, _, _ = path.partition("/")
            if bucket and not self._fs.exists(bucket):  # buckets are not created
                raise
            self._fs.makedirs(path.rpartition("/")[0], exist_ok=True)
            write()

    def names(self, folder: str, kind: str) -> list[str]:
        """Return the names in a folder of one kind, ``"file"`` or ``"directory"``."""
        with suppress(FileNotFoundError):
            found = self._fs.ls(self._at(folder), detail=True)
            paths = [str(one["name"]) for one in found if one["type"] == kind]
            return [path.rstrip("/").rpartition("/")[2] for path in paths]
        return []

    def remove(self, name: str) -> None:
        """Remove a file or a folder if it exists."""
        with suppress(FileNotFoundError):
            self._fs.rm(self._at(name), recursive=True)
