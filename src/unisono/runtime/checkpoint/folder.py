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

import hashlib
import json
import os
import shutil
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any, BinaryIO

from unisono.errors import CheckpointError, NotPlainFileError
from unisono.runtime.checkpoint.sealed import CHUNK_BYTES, Sealed
from unisono.runtime.plainfile import open_in, sync_folder

MODEL_FILE, OPTIMIZER_FILE, RUN_FILE = "model.safetensors", "optimizer.safetensors", "run.json"
FILES = (MODEL_FILE, OPTIMIZER_FILE, RUN_FILE)
COMMIT = "commit.json"
COMMIT_BYTES_AT_MOST = 64 * 1024
_BYTES_AT_MOST = 1 << 62  # of a file that a commit file may speak of

Data = bytes | memoryview
Content = Data | Iterable[Data]


class TooLargeError(CheckpointError):
    """A file is larger than any model or run could need. Final."""


def write_folder(path: Path, contents: Mapping[str, Content]) -> None:
    """Write a checkpoint in a new folder; when this returns it is on the disk, whole.

    `contents`: the bytes of each of :data:`FILES`, at once or as chunks in their order.
    """
    beside = path.with_name(f".{path.name}.{os.getpid()}.part")
    shutil.rmtree(beside, ignore_errors=True)
    beside.mkdir(parents=True)
    try:
        commit = {name: _write_synced(beside / name, contents[name]) for name in FILES}
        _write_synced(beside / COMMIT, json.dumps(commit, indent=1).encode())
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
    read = {}
    for name in FILES:
        held, digest = _read(path, name, facts[name], name in wanted)
        if digest != facts[name]["sha256"]:
            raise CheckpointError(
                f"{name} must have the SHA-256 that commit.json says, but has not."
            )
        if held is not None:
            read[name] = held
    return read


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


def _read(
    path: Path, name: str, fact: Mapping[str, Any], is_wanted: bool
) -> tuple[Sealed | None, str]:
    """Read and hash a file; hold what it says if that is wanted."""
    digest = hashlib.sha256()

    def chunks() -> Iterator[bytes]:
        # No further than it is long now: it may be made to grow as quickly as it is read.
        rest = fact["bytes"] + 1
        while rest > 0 and (chunk := file.read(min(rest, CHUNK_BYTES))):
            digest.update(chunk)
            rest -= len(chunk)
            yield chunk

    with _reading(path, name) as file:
        held = Sealed.of(chunks()) if is_wanted else None
        for _ in chunks() if held is None else ():
            pass
    return held, digest.hexdigest()


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
    except OSError as error:
        raise CheckpointError(f"{name} must be a file, but: {error.strerror}.") from None
    except (MemoryError, OverflowError):
        raise CheckpointError(f"{name} must fit into memory, but does not.") from None


def _write_synced(path: Path, content: Content) -> dict[str, Any]:
    """Write a file; gives what its commit file says of it."""
    digest, size = hashlib.sha256(), 0
    with open(path, "xb") as file:
        for piece in _pieces(content):
            file.write(piece)
            digest.update(piece)
            size += len(piece)
        file.flush()
        os.fsync(file.fileno())
    return {"bytes": size, "sha256": digest.hexdigest()}


def _pieces(content: Content) -> Iterator[memoryview]:
    for chunk in (content,) if isinstance(content, (bytes, memoryview)) else content:
        view = memoryview(chunk)
        for start in range(0, view.nbytes, CHUNK_BYTES):
            yield view.cast("B")[start : start + CHUNK_BYTES]
