"""Missing files come whole, once, from whatever mirror has them; or it is said why not."""

from __future__ import annotations

import errno
import fcntl
import gzip
import hashlib
import multiprocessing
import os
import stat
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from tests.data import server as manners
from tests.data.server import Server, serving
from tests.data.test_datasets import REAL_MNIST, idx
from tests.threads import in_threads

import unisono
from unisono.data import datasets, download, mnist
from unisono.data.download import Published, fetch_missing
from unisono.errors import DownloadError

FILES = {"pictures.gz": gzip.compress(bytes(50_000)), "labels.gz": gzip.compress(b"0123456789")}
CHECKSUMS = {
    "pictures.gz": "sha256:" + hashlib.sha256(FILES["pictures.gz"]).hexdigest(),
    "labels.gz": "md5:" + hashlib.md5(FILES["labels.gz"]).hexdigest(),
}
PUBLISHED = {name: Published(sum, len(FILES[name])) for name, sum in CHECKSUMS.items()}


@pytest.fixture(autouse=True)
def no_proxy_and_no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setattr(download, "PAUSE_S", 0.0)


@pytest.fixture
def server() -> Iterator[Server]:
    with serving(Server(FILES)) as running:
        yield running


@pytest.fixture
def second() -> Iterator[Server]:
    with serving(Server(FILES)) as running:
        yield running


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(download, "TIMEOUT_S", 0.05)


def fetch(folder: Path, *servers: Server) -> None:
    fetch_missing(folder, PUBLISHED, [server.address for server in servers])


def contents(folder: Path) -> dict[str, bytes]:
    """What is in a folder beside the lock."""
    return {
        path.name: path.read_bytes()
        for path in folder.iterdir()
        if path.is_file() and path.name != ".download.lock"
    }


# What comes


def test_missing_files_are_fetched_once_and_checked(tmp_path: Path, server: Server) -> None:
    fetch(tmp_path / "a new" / "folder with spaces", server)
    fetch(tmp_path / "a new" / "folder with spaces", server)
    assert contents(tmp_path / "a new" / "folder with spaces") == FILES
    assert server.asked == {"pictures.gz": 1, "labels.gz": 1}


def test_nothing_but_files_and_the_lock_is_left_and_others_may_read_them(
    tmp_path: Path, server: Server
) -> None:
    fetch(tmp_path, server)
    assert sorted(os.listdir(tmp_path)) == [".download.lock", "labels.gz", "pictures.gz"]
    plain = tmp_path / "plain"
    plain.touch()
    usual = stat.S_IMODE(plain.stat().st_mode)
    assert {stat.S_IMODE((tmp_path / name).stat().st_mode) for name in FILES} == {usual}


def test_what_is_there_packed_or_not_is_left_alone(tmp_path: Path, server: Server) -> None:
    (tmp_path / "labels").write_bytes(b"mine")
    fetch(tmp_path, server)
    assert server.asked == {"pictures.gz": 1}
    assert (tmp_path / "labels").read_bytes() == b"mine"


def test_a_file_of_another_data_set_is_refused_and_left_alone(
    tmp_path: Path, server: Server
) -> None:
    (tmp_path / "labels.gz").write_bytes(b"of Fashion-MNIST, say")
    with pytest.raises(DownloadError, match=r"labels.gz must have the checksum md5:.* delete it"):
        fetch(tmp_path, server)
    assert contents(tmp_path)["labels.gz"] == b"of Fashion-MNIST, say"


def test_a_folder_that_has_all_needs_no_network_no_lock_and_no_pooch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in FILES:
        (tmp_path / name).write_bytes(FILES[name])
    monkeypatch.setitem(sys.modules, "pooch", None)
    fetch_missing(tmp_path, PUBLISHED, ["http://127.0.0.1:9/"])
    assert ".download.lock" not in os.listdir(tmp_path)


@pytest.mark.parametrize("how", [manners.ENCODED, manners.CHUNKED])
def test_a_file_stays_packed_however_the_server_gives_it(
    tmp_path: Path, server: Server, how: str
) -> None:
    server.misbehave(how)
    fetch(tmp_path, server)
    assert contents(tmp_path) == FILES


# Servers that fail


@pytest.mark.parametrize("how", [manners.CUT, manners.BUSY])
def test_what_fails_twice_is_tried_a_third_time(tmp_path: Path, server: Server, how: str) -> None:
    server.misbehave(how, times=2)
    fetch(tmp_path, server)
    assert contents(tmp_path) == FILES
    assert server.asked == {"pictures.gz": 3, "labels.gz": 3}


@pytest.mark.parametrize("how", [manners.CUT, manners.BUSY, manners.REFUSED, manners.SILENT])
def test_the_next_mirror_is_asked_where_one_fails(
    impatient: None, tmp_path: Path, server: Server, second: Server, how: str
) -> None:
    server.misbehave(how)
    fetch(tmp_path, server, second)
    assert contents(tmp_path) == FILES
    assert server.asked == second.asked == {"pictures.gz": 1, "labels.gz": 1}


@pytest.mark.parametrize(
    ("how", "said", "num_asked"),
    [
        (manners.CUT, "no connection, or one that was broken off", 3),
        (manners.BUSY, "status 503 Service Unavailable", 3),
        (manners.REFUSED, "status 404 Not Found", 1),
        (manners.SILENT, "no answer in time", 3),
        (manners.STUCK, "no connection, or one that was broken off", 3),
    ],
)
def test_a_server_that_keeps_failing_is_named_with_what_it_did(
    impatient: None, tmp_path: Path, server: Server, how: str, said: str, num_asked: int
) -> None:
    server.misbehave(how)
    with pytest.raises(DownloadError, match=r"pass `mirrors=`") as caught:
        fetch(tmp_path, server)
    assert f"{server.address}/pictures.gz: {said}" in str(caught.value)
    assert contents(tmp_path) == {}
    assert server.asked == {"pictures.gz": num_asked}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "said"),
    [
        (manners.DRIPS, "too slow: "),
        (manners.DRIPS_CHUNKS, "too slow: "),
        (manners.ENDLESS, "what came is larger than the file's"),
    ],
)
def test_a_server_that_comes_to_no_end_is_given_up(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    server: Server,
    second: Server,
    how: str,
    said: str,
) -> None:
    monkeypatch.setattr(download, "SLOW_S", 0.05)
    server.misbehave(how)
    fetch(tmp_path / "both", server, second)
    assert contents(tmp_path / "both") == FILES
    with pytest.raises(DownloadError, match=r"pass `mirrors=`") as caught:
        fetch(tmp_path / "alone", server)
    assert f"{server.address}/pictures.gz: {said}" in str(caught.value)
    assert server.asked == {"pictures.gz": 4, "labels.gz": 1}


def test_a_wrong_checksum_is_refused_and_not_kept(tmp_path: Path, server: Server) -> None:
    server.files = FILES | {"labels.gz": gzip.compress(b"9876543210")}
    with pytest.raises(DownloadError, match=f"{CHECKSUMS['labels.gz']}.*has another checksum"):
        fetch(tmp_path, server)
    assert contents(tmp_path) == {"pictures.gz": FILES["pictures.gz"]}
    server.files = FILES
    fetch(tmp_path, server)
    assert contents(tmp_path) == FILES
    assert server.asked["pictures.gz"] == 1


@pytest.mark.parametrize(
    ("mirror", "said"),
    [
        ("ftp://127.0.0.1/", "InvalidSchema"),
        ("127.0.0.1/data", "MissingSchema"),
        ("http://127.0.0.1:1/", "no connection"),
    ],
)
def test_an_address_that_is_none_is_named(tmp_path: Path, mirror: str, said: str) -> None:
    with pytest.raises(DownloadError, match=said):
        fetch_missing(tmp_path, PUBLISHED, [mirror])


# Folders that fail


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path, server: Server) -> None:
    (tmp_path / "file").touch()
    for folder in (tmp_path / "file" / "below", Path("/sys/nobody-may-write-here")):
        with pytest.raises(DownloadError, match=rf"{folder} must be a folder that can be written"):
            fetch(folder, server)
    assert server.asked == {}


def test_a_file_system_without_locks_is_named(
    tmp_path: Path, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(fd: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", refuse)
    with pytest.raises(DownloadError, match=r"written and locked, but “.*No locks available”"):
        fetch(tmp_path, server)


def test_a_disk_that_is_full_is_named(
    tmp_path: Path, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(fd: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(DownloadError, match="No space left"):
        fetch(tmp_path, server)
    assert contents(tmp_path) == {}


# Several at once, and those that are killed


def test_whoever_comes_at_the_same_time_waits_and_asks_no_more(
    tmp_path: Path, server: Server
) -> None:
    # Locks are held by open files, so threads exclude each other as processes do.
    together = threading.Barrier(4)

    def come(number: int) -> None:
        together.wait()
        fetch(tmp_path, server)

    assert in_threads(4, come) == [None] * 4
    assert contents(tmp_path) == FILES
    assert server.asked == {"pictures.gz": 1, "labels.gz": 1}


def test_a_downloader_that_is_killed_leaves_nothing_that_is_taken_for_whole(
    tmp_path: Path, server: Server
) -> None:
    server.manners["pictures.gz"] = [manners.STUCK]
    process = multiprocessing.get_context("fork").Process(target=fetch, args=(tmp_path, server))
    process.start()
    assert server.half_way.wait(30)
    process.kill()
    process.join()
    process.close()
    assert contents(tmp_path) == {}
    assert (tmp_path / ".download").is_dir()
    fetch(tmp_path, server)
    assert contents(tmp_path) == FILES
    assert not (tmp_path / ".download").exists()


# Data sets


IMAGES = gzip.compress(idx(np.arange(5 * 28 * 28).reshape(5, 28, 28)))
LABELS = gzip.compress(idx(np.array([3, 1, 4, 1, 5])))
TINY = {
    f"{prefix}-{what}-ubyte.gz": content
    for prefix in ("train", "t10k")
    for what, content in (("images-idx3", IMAGES), ("labels-idx1", LABELS))
}


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    """A server of a data set that is like MNIST, but small."""
    files = {
        name: Published(f"sha256:{hashlib.sha256(content).hexdigest()}", len(content))
        for name, content in TINY.items()
    }
    with serving(Server(TINY)) as running:
        monkeypatch.setattr(datasets, "MNIST", datasets.Source((running.address,), files))
        yield running


def test_a_data_set_fetches_the_files_that_it_reads(tmp_path: Path, tiny: Server) -> None:
    assert len(mnist(tmp_path / "here", train=False, download=True)) == 5
    assert tiny.asked == {name: 1 for name in TINY if name.startswith("t10k")}
    assert mnist(tmp_path / "here", True, True)[2][1].item() == 4
    assert tiny.asked == dict.fromkeys(TINY, 1)


def test_nothing_is_fetched_unasked(tmp_path: Path, tiny: Server) -> None:
    with pytest.raises(FileNotFoundError, match="pass `download=True`"):
        mnist(tmp_path)
    assert tiny.asked == {}


@pytest.mark.parametrize("as_list", [False, True])
def test_mirrors_of_ones_own_take_the_place_of_the_usual(
    tmp_path: Path, tiny: Server, as_list: bool
) -> None:
    with serving(Server(TINY)) as mine:
        mnist(tmp_path, download=True, mirrors=[mine.address] if as_list else mine.address)
        assert mine.asked.total() == 2
    assert tiny.asked == {}
    with pytest.raises(ValueError, match="`mirrors` must name one address at least"):
        mnist(tmp_path, download=True, mirrors=[])


def test_without_pooch_the_remedy_is_named(
    tmp_path: Path, tiny: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pooch", None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'unisono\[download\]'"):
        mnist(tmp_path, download=True)
    assert os.listdir(tmp_path) == []


def load(folder: Path, address: str) -> int:
    return len(unisono.data.mnist(folder, download=True, mirrors=address))


@pytest.mark.slow
@pytest.mark.skipif(not REAL_MNIST.is_dir(), reason=f"MNIST is not in {REAL_MNIST}")
def test_workers_that_start_at_once_fetch_the_real_mnist_once(tmp_path: Path) -> None:
    files = {path.name: path.read_bytes() for path in REAL_MNIST.iterdir()}
    with serving(Server(files)) as server:
        workers = unisono.launch(load, tmp_path, server.address, workers=3)
        assert workers == [60_000] * 3
        assert len(mnist(tmp_path, train=False, download=True, mirrors=server.address)) == 10_000
        assert server.asked == dict.fromkeys(files, 1)
    assert contents(tmp_path) == files


def test_the_lock_is_not_made_through_a_link(tmp_path: Path, server: Server) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    (folder / ".download.lock").symlink_to(tmp_path / "outside")
    with pytest.raises(DownloadError, match="symbolic link"):
        fetch(folder, server)
    assert not (tmp_path / "outside").exists()
