"""One checkpoint as a folder: whole or not there, and verified before it is used.

::

    step-000000000812/
      model.safetensors       parameters and buffers
      optimizer.safetensors   the optimizer's tensors
      run.json                everything else
      commit.json             name, size and SHA-256 of the three; written last

Written beside under another name, synced, renamed. Reading opens these four names and no others,
follows no link, and trusts no size before it is compared with the file's own. What is read lies in
memory of its own from then on, once for all who want it, whatever becomes of the file.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
import queue
import shutil
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any, BinaryIO, final

from unisono.errors import CheckpointError, NotPlainFileError
from unisono.runtime.checkpoint.sealed import CHUNK_BYTES, Sealed
from unisono.runtime.plainfile import open_in, sync_folder

MODEL_FILE, OPTIMIZER_FILE, RUN_FILE = "model.safetensors", "optimizer.safetensors", "run.json"
FILES = (MODEL_FILE, OPTIMIZER_FILE, RUN_FILE)
COMMIT = "commit.json"
COMMIT_BYTES_AT_MOST = 64 * 1024
_BYTES_AT_MOST = 1 << 62  # of a file that a commit file may speak of

_CHUNKS_AHEAD = 16  # that are read or written before they are hashed
_SPAN_BYTES = 4 << 20  # of a file, with which thread and disk begin while more is written
_START_WRITING = 2  # SYNC_FILE_RANGE_WRITE

Data = bytes | memoryview
Content = Data | Iterable[Data]
Hash = Callable[[Any, Sequence[Data]], None]
"""Adds chunks, which must stay as they are, to a digest of hashlib."""


@final
class TooLargeError(CheckpointError):
    """A file is larger than any model or run could need."""


@final
class ForbiddenError(CheckpointError):
    """A file may be whole, but this user may not read it."""


def write_folder(path: Path, contents: Mapping[str, Content]) -> None:
    """Write a checkpoint in a new folder; when this returns it is on the disk, whole.

    `contents`: the bytes of each of :data:`FILES`, at once or as chunks in their order.
    """
    beside = path.with_name(f".{path.name}.{os.getpid()}.part")
    shutil.rmtree(beside, ignore_errors=True)
    beside.mkdir(parents=True)
    try:
        with _hashing_beside() as add:
            facts = {name: _write_synced(beside / name, contents[name], add) for name in FILES}
        commit = {n: {"bytes": size, "sha256": it.hexdigest()} for n, (size, it) in facts.items()}
        text = json.dumps(commit, indent=1).encode()
        _write_synced(beside / COMMIT, text, lambda digest, chunks: None)
        sync_folder(beside)
        os.rename(beside, path)
        sync_folder(path.parent)
    finally:
        shutil.rmtree(beside, ignore_errors=True)


def read_folder(
    path: Path,
    at_most: Mapping[str, int] = MappingProxyType({}),
    wanted: Collection[str] = FILES,
) -> dict[str, Sealed]:
    """Read the `wanted` files of a checkpoint, all of which must be what its commit file says.

    Others are compared without holding them in memory. None is read if one is larger than there is
    a use for (`at_most`), with a TooLargeError.
    """
    facts = _read_commit(path)
    for name in FILES:
        with _reading(path, name) as file:
            size = os.fstat(file.fileno()).st_size
        if size != facts[name]["bytes"]:
            raise CheckpointError(f"{name} must have {facts[name]['bytes']} bytes, but has {size}.")
        check_size(name, size, at_most.get(name, size))
    with _hashing_beside() as add:
        read = {name: _read(path, name, facts[name], name in wanted, add) for name in FILES}
    for name, (_, digest) in read.items():
        if digest.hexdigest() != facts[name]["sha256"]:
            raise CheckpointError(
                f"{name} must have the SHA-256 that commit.json says, but has not."
            )
    return {name: held for name, (held, _) in read.items() if held is not None}


def check_folder(path: Path) -> dict[str, int]:
    """Compare a checkpoint's files with its commit file; return their sizes in bytes."""
    read_folder(path, wanted=())
    return {name: fact["bytes"] for name, fact in _read_commit(path).items()}


def digest_of_state(path: Path) -> str:
    """Read the SHA-256 of a checkpoint's tensors, as its commit file says them."""
    facts = _read_commit(path)
    return " ".join(facts[name]["sha256"] for name in (MODEL_FILE, OPTIMIZER_FILE))


def check_size(name: str, size: int, at_most: int) -> None:
    """Refuse, with a TooLargeError, a file that is larger than there is a use for."""
    if size > at_most:
        raise TooLargeError(
            f"{name} must have at most {at_most:,} bytes, as there is no use for more here, but "
            f"has "
            f"{size:,}: pass another directory, or remove this one if somebody has tampered with "
            f"it."
        )


@contextmanager
def _hashing_beside() -> Iterator[Hash]:
    """Have a thread hash while this one reads or writes; digests are whole behind the block.

    A thread of its own: a pool takes nothing once the program has come to its end.
    """
    waiting: queue.Queue[tuple[Any, Sequence[Data]]] = queue.Queue(_CHUNKS_AHEAD)
    failed: list[BaseException] = []

    def add(digest: Any, chunks: Sequence[Data]) -> None:
        for chunk in chunks:
            digest.update(chunk)

    def work() -> None:
        while (one := waiting.get())[1]:
            try:
                add(*one)
            except BaseException as error:  # else nobody would take what comes next
                failed.append(error)

    thread = threading.Thread(target=work, name="unisono-hash")
    try:
        thread.start()
    except RuntimeError:  # there may be no more threads
        yield add
        return
    try:
        yield lambda digest, chunks: waiting.put((digest, chunks))
    finally:
        waiting.put((None, ()))
        thread.join()
    if failed:
        raise failed[0]


def _read(
    path: Path, name: str, fact: Mapping[str, Any], is_wanted: bool, add: Hash
) -> tuple[Sealed | None, Any]:
    """Read and hash a file; hold what it says if that is wanted."""
    digest = hashlib.sha256()

    def chunks() -> Iterator[bytes]:
        # No further than it is long now: it may be made to grow as quickly as it is read.
        rest = fact["bytes"] + 1
        while rest > 0 and (chunk := file.read(min(rest, CHUNK_BYTES))):
            add(digest, [chunk])
            rest -= len(chunk)
            yield chunk

    with _reading(path, name) as file:
        held = Sealed.of(chunks()) if is_wanted else None
        for _ in chunks() if held is None else ():
            pass
    return held, digest


def _read_commit(path: Path) -> dict[str, dict[str, Any]]:
    with _reading(path, COMMIT) as file:
        return parse_commit(file.read(COMMIT_BYTES_AT_MOST + 1))


def parse_commit(text: bytes) -> dict[str, dict[str, Any]]:
    """Understand a commit file: by name of each of :data:`FILES`, its ``bytes`` and ``sha256``."""
    try:
        facts = json.loads(text) if len(text) <= COMMIT_BYTES_AT_MOST else None
    except (ValueError, RecursionError):
        facts = None
    if not isinstance(facts, dict) or set(facts) != set(FILES):
        raise CheckpointError(f"{COMMIT} must name {', '.join(FILES)}, but does not.")
    for name, fact in facts.items():
        if (
            not isinstance(fact, dict)
            or type(fact.get("bytes")) is not int
            or not 0 <= fact["bytes"] < _BYTES_AT_MOST
            or not isinstance(fact.get("sha256"), str)
        ):
            raise CheckpointError(f"{COMMIT} must give size and SHA-256 of {name}, but does not.")
    return facts


@contextmanager
def _reading(path: Path, name: str) -> Iterator[BinaryIO]:
    """Open a file of the folder; whatever cannot be read is damaged."""
    try:
        folder = os.open(path, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            fd = open_in(folder, Path(name), os.O_RDONLY)
        finally:
            os.close(folder)
        with os.fdopen(fd, "rb") as file:
            yield file
    except NotPlainFileError as error:
        raise CheckpointError(str(error)) from None
    except PermissionError:
        raise ForbiddenError(
            f"{path.name} in {path.parent} must be readable for you, but its {name} is not, so "
            f"nobody knows whether it is whole: ask its owner for it, or pass another `directory`."
        ) from None
    except OSError as error:
        raise CheckpointError(f"{name} must be a file, but: {error.strerror}.") from None
    except (MemoryError, OverflowError):
        raise CheckpointError(f"{name} must fit into memory, but does not.") from None


def _write_synced(path: Path, content: Content, add: Hash) -> tuple[int, Any]:
    """Write and hash a file; returns its bytes and its digest."""
    digest, begun, size, span = hashlib.sha256(), 0, 0, []
    start_writing = getattr(ctypes.CDLL(None), "sync_file_range", None)
    with open(path, "xb") as file:
        for piece in _pieces(content):
            file.write(piece)
            size += len(piece)
            span.append(piece)
            if size - begun >= _SPAN_BYTES:
                add(digest, span)
                if start_writing is not None:
                    bounds = ctypes.c_int64(begun), ctypes.c_int64(size - begun)
                    start_writing(file.fileno(), *bounds, _START_WRITING)
                begun, span = size, []
        if span:
            add(digest, span)
        file.flush()
        os.fsync(file.fileno())
    return size, digest


def _pieces(content: Content) -> Iterator[memoryview]:
    for chunk in (content,) if isinstance(content, (bytes, memoryview)) else content:
        view = memoryview(chunk)
        for start in range(0, view.nbytes, CHUNK_BYTES):
            yield view.cast("B")[start : start + CHUNK_BYTES]
