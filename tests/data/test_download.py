"""Missing files come whole and once; or it is said why not."""

from __future__ import annotations

import gzip
import hashlib
import os
import stat
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest
from tests.data.test_datasets import idx
from tests.threads import in_threads

from unisono.data import datasets, mnist
from unisono.data.datasets import fetch_missing
from unisono.errors import DownloadError

FILES = {
    f"{prefix}-{what}-ubyte.gz": gzip.compress(content)
    for prefix in ("train", "t10k")
    for what, content in (
        ("images-idx3", idx(np.arange(5 * 28 * 28).reshape(5, 28, 28))),
        ("labels-idx1", idx(np.array([3, 1, 4, 1, 5]))),
    )
}
CHECKSUMS = {name: f"md5:{hashlib.md5(content).hexdigest()}" for name, content in FILES.items()}
LABELS = "train-labels-idx1-ubyte.gz"


class Handler(SimpleHTTPRequestHandler):
    def do_GET(self) -> None:
        asked[self.path.rpartition("/")[2]] += 1
        super().do_GET()

    def log_message(self, *_: object) -> None:
        pass


asked: Counter[str] = Counter()


@pytest.fixture
def served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder of files that are like MNIST's, but small, on a server of the loopback."""
    folder = tmp_path / "served"
    folder.mkdir()
    for name, content in FILES.items():
        (folder / name).write_bytes(content)
    asked.clear()
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    http = ThreadingHTTPServer(("127.0.0.1", 0), partial(Handler, directory=str(folder)))
    thread = threading.Thread(target=http.serve_forever, args=(0.01,))
    thread.start()
    address = f"http://127.0.0.1:{http.server_port}/"
    monkeypatch.setattr(datasets, "MNIST", datasets.Source(address, CHECKSUMS))
    yield folder
    http.shutdown()
    http.server_close()
    thread.join()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "a new" / "folder with spaces"


def fetch(folder: Path) -> None:
    fetch_missing(folder, CHECKSUMS, datasets.MNIST.address)


def test_a_data_set_fetches_the_files_that_it_reads_once(served: Path, folder: Path) -> None:
    assert len(mnist(folder, train=False, download=True)) == 5
    assert asked == {name: 1 for name in FILES if name.startswith("t10k")}
    assert mnist(folder, True, True)[2][1].item() == 4
    assert mnist(folder, True, True)[2][1].item() == 4
    assert asked == dict.fromkeys(FILES, 1)


def test_nothing_but_files_and_the_lock_is_left_and_others_may_read_them(
    served: Path, folder: Path
) -> None:
    fetch(folder)
    assert sorted(os.listdir(folder)) == [".download.lock", *sorted(FILES)]
    (folder / "plain").touch()
    usual = stat.S_IMODE((folder / "plain").stat().st_mode)
    assert {stat.S_IMODE((folder / name).stat().st_mode) for name in FILES} == {usual}


def test_what_is_there_packed_or_not_is_left_alone(served: Path, folder: Path) -> None:
    folder.mkdir(parents=True)
    (folder / LABELS.removesuffix(".gz")).write_bytes(b"mine")
    fetch(folder)
    assert LABELS not in asked
    assert not (folder / LABELS).exists()


def test_a_file_of_another_data_set_is_refused_and_left_alone(served: Path, folder: Path) -> None:
    folder.mkdir(parents=True)
    (folder / LABELS).write_bytes(b"of Fashion-MNIST, say")
    with pytest.raises(DownloadError, match=rf"{LABELS} must have the checksum md5:.* delete it"):
        fetch(folder)
    assert (folder / LABELS).read_bytes() == b"of Fashion-MNIST, say"


def test_a_folder_that_has_all_needs_no_network_no_lock_and_no_pooch(
    served: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pooch", None)
    fetch_missing(served, CHECKSUMS, "http://127.0.0.1:9/")
    assert ".download.lock" not in os.listdir(served)


def test_a_wrong_checksum_is_refused_and_not_kept(served: Path, folder: Path) -> None:
    (served / LABELS).write_bytes(gzip.compress(b"9876543210"))
    with pytest.raises(DownloadError, match="hash"):
        fetch(folder)
    assert LABELS not in os.listdir(folder)
    (served / LABELS).write_bytes(FILES[LABELS])
    fetch(folder)
    assert asked == {**dict.fromkeys(FILES, 1), LABELS: 2}


def test_what_cannot_be_had_is_named_with_the_reason(served: Path, folder: Path) -> None:
    (served / LABELS).unlink()
    with pytest.raises(DownloadError, match=r"must come from http.*404.*put the files there"):
        fetch(folder)
    with pytest.raises(DownloadError, match="refused"):
        fetch_missing(folder, CHECKSUMS, "http://127.0.0.1:1/")


def test_a_folder_that_cannot_be_written_is_named(served: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for folder in (tmp_path / "file" / "below", Path("/sys/nobody-may-write-here")):
        with pytest.raises(DownloadError, match=rf"into {folder}, but"):
            fetch(folder)
    assert asked == {}


def test_whoever_comes_at_the_same_time_waits_and_asks_no_more(served: Path, folder: Path) -> None:
    # Locks are held by open files, so threads exclude each other as processes do.
    together = threading.Barrier(4)

    def come(number: int) -> None:
        together.wait()
        fetch(folder)

    assert in_threads(4, come) == [None] * 4
    assert asked == dict.fromkeys(FILES, 1)


def test_nothing_is_fetched_unasked(served: Path, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="pass `download=True`"):
        mnist(tmp_path)
    assert asked == {}


def test_without_pooch_the_remedy_is_named(
    served: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pooch", None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'unisono\[download\]'"):
        mnist(folder, download=True)
    assert not folder.exists()


def test_the_lock_is_not_made_through_a_link(served: Path, folder: Path) -> None:
    folder.mkdir(parents=True)
    (folder / ".download.lock").symlink_to(folder / "outside")
    with pytest.raises(DownloadError, match="symbolic link"):
        fetch(folder)
    assert not (folder / "outside").exists()
