"""Download files into a folder, once per host.

::

    folder/.download.lock    held by the process that downloads, as long as it lives
    folder/.download/        where a file grows until its checksum has been compared
    folder/NAME              whole and synced when it gets this name

Invariant: what has its name in the folder is whole. The lock is the kernel's (``flock``), which
releases it when its holder dies; the next holder removes what was left. Pooch downloads over
`requests`, which knows proxies and certificates. What comes is bytes, compared with a checksum that
was known before, and never unpickled. Transfers that stay slow are given up: a socket's timeout
counts from one byte to the next, so a server that sends one now and then would be awaited for days.
"""

from __future__ import annotations

import fcntl
import functools
import hashlib
import os
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from unisono.errors import DownloadError
from unisono.plainfile import open_plain

if TYPE_CHECKING:
    import requests

TIMEOUT_S = 30.0  # for a server's next bytes
PAUSE_S = 1.0  # before all mirrors are tried again, and twice that before the third time
# A modem's pace: MNIST's largest file then takes half an hour. Slower must last for SLOW_S, as a
# connection that stumbles recovers within seconds.
SLOWEST_BYTES_PER_S = 5_000
SLOW_S = 30.0
_ROUNDS = 3
_PIECE_BYTES = 1 << 16


class TransferGivenUpError(Exception):
    """A transfer would not come to its end in a sane time, or not to that of the file."""


class Published(NamedTuple):
    """What is known of a file before it comes: its checksum, such as ``sha256:…``, and its size."""

    checksum: str
    num_bytes: int


def fetch_missing(folder: Path, files: Mapping[str, Published], mirrors: Sequence[str]) -> None:
    """Download the files that are not in a folder, packed or not; make the folder if need be.

    Args:
        folder: where to.
        files: what is known of them, by file name.
        mirrors: addresses of folders, tried in turn, up to three times each.

    Raises:
        ValueError: there are no mirrors.
        ModuleNotFoundError: something is missing, and so is pooch.
        DownloadError: no mirror gives a file with its checksum, or the folder cannot be written,
            or has a file with another.
    """
    if not mirrors:
        raise ValueError("`mirrors` must name one address at least, but is empty: leave it out.")
    if all(_is_there(folder, name, file.checksum) for name, file in files.items()):
        return
    _check_installed(folder, files)
    try:
        with _locked(folder) as growing:
            for name, file in files.items():
                if not _is_there(folder, name, file.checksum):
                    _download(name, file, mirrors, growing)
                    _publish(growing / name, folder / name)
    except DownloadError:
        raise
    except OSError as error:
        raise DownloadError(
            f"{folder} must be a folder that can be written and locked, but “{error}”: pass "
            f"another one, or put {', '.join(files)} there yourself."
        ) from error


def _is_there(folder: Path, name: str, checksum: str) -> bool:
    """Look for a file, unpacked or else packed; what is packed must be what it is taken for."""
    if (folder / name.removesuffix(".gz")).is_file():
        return True
    path = folder / name
    if not path.is_file():
        return False
    kind, _, digits = checksum.partition(":")
    found = hashlib.new(kind, path.read_bytes(), usedforsecurity=False).hexdigest()
    if found != digits:
        raise DownloadError(
            f"{path} must have the checksum {checksum}, but has {found}, so it is damaged or of "
            f"another data set: delete it, or pass another folder."
        )
    return True


def _check_installed(folder: Path, names: Iterable[str]) -> None:
    try:
        import pooch  # noqa: F401
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"`download=True` needs the package {error.name}, which is not installed: run "
            f"`pip install 'unisono[download]'`, or put {', '.join(names)} into {folder} yourself.",
            name=error.name,
        ) from error


@contextmanager
def _locked(folder: Path) -> Iterator[Path]:
    """Hold a folder's lock, and give a folder below for what is not whole yet."""
    folder.mkdir(parents=True, exist_ok=True)
    growing = folder / ".download"
    lock_fd = open_plain(folder / ".download.lock", os.O_RDWR | os.O_CREAT)
    try:
        fcntl.flock(lock_fd, fcntl.LOCK_EX)
        shutil.rmtree(growing, ignore_errors=True)
        growing.mkdir()
        try:
            yield growing
        finally:
            shutil.rmtree(growing, ignore_errors=True)
    finally:
        os.close(lock_fd)


def _download(name: str, file: Published, mirrors: Sequence[str], growing: Path) -> None:
    """Take a file from the first mirror that gives it with its checksum."""
    import pooch
    import requests

    failures: dict[str, Exception] = {}
    addresses = [f"{mirror.rstrip('/')}/{name}" for mirror in mirrors]
    for round_number in range(_ROUNDS):
        if not addresses:
            break
        time.sleep(PAUSE_S * round_number)
        for address in addresses:
            try:
                with _downloader(file.num_bytes) as downloader:
                    pooch.retrieve(address, file.checksum, name, growing, downloader=downloader)
            except (requests.RequestException, TransferGivenUpError, ValueError) as error:
                failures[address] = error
            else:
                return
        addresses = [address for address in addresses if not _is_final(failures[address])]
    seen = "; ".join(f"{address}: {_said(error)}" for address, error in failures.items())
    raise DownloadError(
        f"{name} must come with the checksum {file.checksum} from one of its mirrors, but did not "
        f"({seen}): check the network, pass `mirrors=` with an address that has it, or put the "
        f"file into {growing.parent} yourself."
    ) from next(reversed(failures.values()))


@contextmanager
def _downloader(num_bytes: int) -> Iterator[Callable[..., None]]:
    """Give pooch's downloader, that unpacks nothing and whose connections end with the block."""
    import pooch

    with ExitStack() as stack:

        def watch(response: requests.Response, *_: Any, **__: Any) -> None:
            stack.callback(response.close)
            at_most = _PIECE_BYTES if response.is_redirect else num_bytes
            read = functools.partial(_read, response.raw)
            # requests' own waits for a whole piece, however slowly it comes.
            response.iter_content = lambda *_, **__: watched(  # type: ignore[method-assign]
                read, at_most, slow_s=SLOW_S
            )

        yield pooch.HTTPDownloader(
            timeout=TIMEOUT_S,
            chunk_size=_PIECE_BYTES,
            headers={"Accept-Encoding": "identity"},
            hooks={"response": watch},
        )


def watched(
    read: Callable[[], bytes],
    num_bytes: int,
    *,
    slow_s: float = SLOW_S,
    clock: Callable[[], float] = time.monotonic,
) -> Iterator[bytes]:
    """Give what comes, piece by piece.

    Args:
        read: waits for some bytes and gives them; none at the end.
        num_bytes: how many there are at most.
        slow_s: how long fewer than :data:`SLOWEST_BYTES_PER_S` may come.
        clock: gives the time in seconds.

    Raises:
        TransferGivenUpError: it is slow for longer, or there are more bytes.
    """
    total = seen = 0
    seen_at_s = clock()
    while piece := read():
        total += len(piece)
        if total > num_bytes:
            raise TransferGivenUpError(f"what came is larger than the file's {num_bytes:,} bytes")
        yield piece
        seconds = clock() - seen_at_s
        if seconds >= slow_s and total < num_bytes:
            if total - seen < SLOWEST_BYTES_PER_S * seconds:
                raise TransferGivenUpError(
                    f"too slow: {total - seen:,} bytes in {seconds:.3g} s, where "
                    f"{SLOWEST_BYTES_PER_S:,} a second are the least"
                )
            seen, seen_at_s = total, clock()


def _read(body: Any) -> bytes:
    """Read what has come of a body, packed as it is, or wait for more.

    Raises:
        requests.ConnectionError: nothing comes in time, or the connection has broken off.
    """
    import requests
    import urllib3

    try:
        return body.read1(_PIECE_BYTES, decode_content=False) or b""
    except urllib3.exceptions.HTTPError as error:
        raise requests.ConnectionError(error) from error


def _is_final(error: Exception) -> bool:
    """Tell whether a mirror will say the same when it is asked again."""
    import requests

    if isinstance(error, requests.HTTPError) and error.response is not None:
        return 400 <= error.response.status_code < 500
    return isinstance(error, requests.RequestException) and isinstance(error, ValueError)


def _said(error: Exception) -> str:
    import requests

    if isinstance(error, requests.HTTPError) and error.response is not None:
        return f"status {error.response.status_code} {error.response.reason}"
    if isinstance(error, requests.Timeout):
        return "no answer in time"
    if isinstance(error, (requests.ConnectionError, requests.exceptions.ChunkedEncodingError)):
        return "no connection, or one that was broken off"
    if isinstance(error, requests.RequestException):
        return f"{type(error).__name__}: {error}"
    if isinstance(error, TransferGivenUpError):
        return str(error)
    return "what came has another checksum"


def _publish(path: Path, name: Path) -> None:
    """Give a file that is whole its name: on the disk first, readable as new files are here."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
    # Temporary files are their owner's alone.
    path.chmod((name.parent / ".download.lock").stat().st_mode & 0o666)
    path.replace(name)
