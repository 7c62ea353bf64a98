"""One checkpoint as a folder: complete or absent, and verified before use.

::

    step-000000000812/
      model.safetensors       parameters and buffers
      optimizer.safetensors   the optimizer's tensors
      run.json                everything else
      commit.json             name, size and SHA-256 of the three; written last

A folder is written under a temporary name, synced, then renamed. Reading opens only these four
files, follows no link, and compares each size with the file's real size before using it. The
contents are read once into memory that does not change with the file, for all that need them.
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
_BYTES_AT_MOST = 1 << 62  # the largest file size that a commit file may state

_CHUNKS_AHEAD = 16  # chunks that may be read or written before they are hashed
_SPAN_BYTES = 4 << 20  # hashed and sent to the disk at a time, while more is written
_START_WRITING = 2  # SYNC_FILE_RANGE_WRITE

Data = bytes | memoryview
Content = Data | Iterable[Data]
Hash = Callable[[Any, Sequence[Data]], None]
"""Adds chunks, which must not change, to a digest of hashlib."""


@final
class TooLargeError(CheckpointError):
    """A file is larger than any model or run could need."""


@final
class ForbiddenError(CheckpointError):
    """This user may not read a file, which may be complete."""


def write_folder(path: Path, contents: Mapping[str, Content]) -> None:
    """Write a checkpoint to a new folder; it is completely on the disk when this returns.

    `contents`: the bytes of each of :data:`FILES`, as one value or as chunks in order.
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
    """Read the `wanted` files of a checkpoint, after comparing all files with its commit file.

    Other files are compared without keeping them in memory. First raises a TooLargeError if one
    exceeds `at_most`.
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
            raise CheckpointError(f"{name} does not match its checksum in commit.json.")
    return {name: held for name, (held, _) in read.items() if held is not None}


def read_run_file(path: Path, at_most: int) -> Sealed:
    """Read the run file of a checkpoint whose tensors may be gone, and compare its checksum."""
    fact = _read_commit(path)[RUN_FILE]
    check_size(RUN_FILE, fact["bytes"], at_most)
    with _hashing_beside() as add:
        held, digest = _read(path, RUN_FILE, fact, True, add)
    if held is None or digest.hexdigest() != fact["sha256"]:
        raise CheckpointError(f"{RUN_FILE} does not match its checksum in commit.json.")
    return held


def check_folder(path: Path) -> dict[str, int]:
    """Compare a checkpoint's files with its commit file; return their sizes in bytes."""
    read_folder(path, wanted=())
    return {name: fact["bytes"] for name, fact in _read_commit(path).items()}


def digest_of_state(path: Path) -> str:
    """Return the SHA-256 of a checkpoint's tensors, from its commit file."""
    facts = _read_commit(path)
    return " ".join(facts[name]["sha256"] for name in (MODEL_FILE, OPTIMIZER_FILE))


def check_size(name: str, size: int, at_most: int) -> None:
    """Raise a TooLargeError if a file is larger than it can need to be."""
    if size > at_most:
        raise TooLargeError(
            f"{name} must have at most {at_most:,} bytes, as it cannot need more here, but has "
            f"{size:,}: pass another directory, or remove this one if somebody has tampered with "
            f"it."
        )


@contextmanager
def _hashing_beside() -> Iterator[Hash]:
    """Hash in a thread while this one reads or writes; digests are complete after the block.

    Uses a new thread: a thread pool accepts no work once the program is ending.
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
            except BaseException as error:  # otherwise the queue would fill and block
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
    """Read and hash a file; return its contents, if wanted, and its digest."""
    digest = hashlib.sha256()

    def chunks() -> Iterator[bytes]:
        # Read no further than its present size: it could grow as fast as it is read.
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
    """Return the ``bytes`` and ``sha256`` that a commit file has for each of :data:`FILES`."""
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
    """Open a file of the folder; a file that cannot be read counts as damaged."""
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
            f"{path.name} in {path.parent} must be readable for you, but its {name} is not, so it "
            f"cannot be verified: ask its owner for access, or pass another `directory`."
        ) from None
    except OSError as error:
        raise CheckpointError(f"{name} must be a file, but: {error.strerror}.") from None
    except (MemoryError, OverflowError):
        raise CheckpointError(f"{name} must fit into memory, but does not.") from None


def _write_synced(path: Path, content: Content, add: Hash) -> tuple[int, Any]:
    """Write, hash and sync a file; return its size and digest."""
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
