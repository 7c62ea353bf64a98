"""A folder for one user alone: what is believed there, and what is refused."""

import os
import stat

import pytest

import unisono.workers.private
from unisono.errors import RendezvousError
from unisono.workers.private import PrivateFolder, locked


@pytest.fixture
def environ(tmp_path):
    return {"XDG_RUNTIME_DIR": str(tmp_path)}


@pytest.fixture
def folder(environ):
    folder = PrivateFolder.open(environ)
    yield folder
    folder.close()


def test_it_is_for_its_user_alone(folder, tmp_path):
    assert folder.path == str(tmp_path / f"unisono-{os.geteuid()}")
    assert stat.S_IMODE(os.stat(folder.path).st_mode) == 0o700


@pytest.mark.parametrize("base", ["", "/nowhere"])
def test_without_a_runtime_folder_it_is_among_temporary_files(base, tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    folder = PrivateFolder.open({"XDG_RUNTIME_DIR": base})
    folder.close()
    assert folder.path == str(tmp_path / f"unisono-{os.geteuid()}")


def test_a_link_in_its_place_is_refused(environ, tmp_path):
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    (tmp_path / f"unisono-{os.geteuid()}").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(RendezvousError, match="must have a folder of their own"):
        PrivateFolder.open(environ)


@pytest.mark.parametrize("mode", [0o770, 0o701, 0o777])
def test_one_that_others_can_use_is_refused(environ, tmp_path, mode):
    (tmp_path / f"unisono-{os.geteuid()}").mkdir()
    (tmp_path / f"unisono-{os.geteuid()}").chmod(mode)
    with pytest.raises(RendezvousError, match=f"has mode {mode:o}: remove it"):
        PrivateFolder.open(environ)


def test_one_of_another_user_is_refused(environ, tmp_path, monkeypatch):
    mine = os.geteuid()
    monkeypatch.setattr("os.geteuid", lambda: mine + 1)
    (tmp_path / f"unisono-{mine + 1}").mkdir(mode=0o700)
    with pytest.raises(RendezvousError, match=f"belongs to user {mine} "):
        PrivateFolder.open(environ)


def test_a_word_is_held_until_it_is_taken_back(folder):
    held = folder.leave("job", "here")
    assert (folder.read("job").text, folder.read("job").is_held) == ("here", True)
    assert folder.leave("job", "also here") is None
    folder.take_back("job", held)
    assert folder.read("job") is None


def test_what_nobody_holds_is_replaced(folder):
    os.close(folder.leave("job", "old"))
    assert not folder.read("job").is_held
    held = folder.leave("job", "new")
    assert (folder.read("job").text, folder.read("job").is_held) == ("new", True)
    folder.take_back("job", held)


def test_what_nobody_holds_is_removed_by_the_next_who_comes(folder):
    others = folder.leave("held", "")
    for name in ("left over", "torn.new"):
        os.close(folder.leave(name, ""))
    mine = folder.leave("mine", "")
    assert sorted(os.listdir(folder.path)) == ["held", "mine"]
    folder.take_back("mine", mine)
    folder.take_back("held", others)
    assert os.listdir(folder.path) == []


def test_a_link_is_not_read(folder, tmp_path):
    (tmp_path / "secret").write_text("secret")
    os.symlink(tmp_path / "secret", os.path.join(folder.path, "job"))
    with pytest.raises(OSError):
        folder.read("job")


def test_a_link_in_the_place_of_a_word_is_replaced_not_followed(folder, tmp_path):
    (tmp_path / "other").write_text("untouched")
    os.symlink(tmp_path / "other", os.path.join(folder.path, "job.new"))
    with pytest.raises(FileExistsError):
        folder.leave("job", "mine")
    assert (tmp_path / "other").read_text() == "untouched"


def test_nobody_waits_for_ever_for_a_stopped_process(folder, environ, monkeypatch):
    monkeypatch.setattr(unisono.workers.private, "_LOCKED_AT_MOST_S", 0.05)
    other = PrivateFolder.open(environ)
    with (
        locked(other._fd, "the folder"),
        pytest.raises(RendezvousError, match="look for a stopped process"),
    ):
        folder.leave("job", "mine")
    other.close()
