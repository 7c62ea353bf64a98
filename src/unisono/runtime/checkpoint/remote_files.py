"""The files below a URL, over fsspec: read, write, list, remove; no name is taken from a file."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path

from unisono.runtime.plainfile import check_plain

SMALL_BYTES, _CHUNK_BYTES = 1 << 16, 4 << 20


class RemoteFiles:
    """The files below a URL, by their names there. Final."""

    def __init__(self, url: str) -> None:
        from fsspec.core import url_to_fs

        if url.startswith("memory:"):
            raise ValueError("what is in the memory of a process ends with it")
        self._fs, self._root = url_to_fs(url, skip_instance_cache=True)

    def _at(self, name: str) -> str:
        self._fs.invalidate_cache()  # others write there, too
        return f"{self._root.rstrip('/')}/{name}".rstrip("/")

    def chunks(self, name: str, at_most: int) -> Iterator[bytes]:
        """Read a file, and at most one byte too much."""
        rest = at_most + 1
        with self._fs.open(self._at(name), "rb") as file:
            while rest > 0 and (chunk := file.read(min(rest, _CHUNK_BYTES))):
                rest -= len(chunk)
                yield chunk

    def read(self, name: str) -> bytes:
        """Read a small file; empty if there is none."""
        with suppress(FileNotFoundError):
            return b"".join(self.chunks(name, SMALL_BYTES))
        return b""

    def write(self, name: str, data: bytes | Path) -> None:
        """Write a file, or copy a local one."""
        path = self._at(name)
        if isinstance(data, Path):
            check_plain(data)
            self._in_folder(path, lambda: self._fs.put_file(str(data), path))
        else:
            self._in_folder(path, lambda: self._fs.pipe_file(path, data))

    def _in_folder(self, path: str, write: Callable[[], None]) -> None:
        try:
            write()
        except FileNotFoundError:
            bucket, _, _ = path.partition("/")
            if bucket and not self._fs.exists(bucket):  # none is made
                raise
            self._fs.makedirs(path.rpartition("/")[0], exist_ok=True)
            write()

    def names(self, folder: str, kind: str) -> list[str]:
        """List what a folder has of a kind, ``"file"`` or ``"directory"``."""
        with suppress(FileNotFoundError):
            found = self._fs.ls(self._at(folder), detail=True)
            paths = [str(one["name"]) for one in found if one["type"] == kind]
            return [path.rstrip("/").rpartition("/")[2] for path in paths]
        return []

    def remove(self, name: str) -> None:
        """Remove a file or a folder, if it is there."""
        with suppress(FileNotFoundError):
            self._fs.rm(self._at(name), recursive=True)

    def move(self, name: str, to: str) -> None:
        """Rename a folder of files."""
        for one in self.names(name, "file"):
            source, target = self._at(f"{name}/{one}"), self._at(f"{to}/{one}")
            self._in_folder(target, partial(self._fs.cp_file, source, target))
        self.remove(name)
