import os

import pytest

from unisono.tools.verify import recorder as scratch
from unisono.tools.verify.recorder import copy_folder, unlink_target


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr(scratch, "COPIED_AT_MOST_BYTES", 10)
    source = tmp_path / "source folder"
    (source / "package" / "deep").mkdir(parents=True)
    (source / ".git").mkdir()
    (source / "package" / "deep" / "a.py").write_text("a = 1")
    (source / "model.pt").write_text("a large checkpoint")
    (source / ".git" / "config").write_text("x")
    os.mkfifo(source / "pipe")
    (source / "dangling").symlink_to("nowhere")
    copy_folder(source, tmp_path / "copy")
    return source, tmp_path / "copy"


def test_small_files_are_copied_and_the_rest_is_linked(folder):
    source, copy = folder
    (copy / "package" / "deep" / "a.py").write_text("b")
    assert (source / "package" / "deep" / "a.py").read_text() == "a = 1"
    assert (copy / "model.pt").is_symlink()
    assert (copy / ".git").is_symlink()
    (copy / "package" / "new.txt").write_text("new")
    assert not (source / "package" / "new.txt").exists()


def test_a_large_file_is_left_alone_by_who_writes_and_so_are_links_elsewhere(folder, tmp_path):
    source, copy = folder
    unlink_target(str(copy), str(copy / "model.pt"))
    assert (copy / "model.pt").read_text() == "a large checkpoint"
    (copy / "model.pt").write_text("other")
    assert (source / "model.pt").read_text() == "a large checkpoint"
    (tmp_path / "mine").symlink_to(source / "model.pt")
    unlink_target(str(copy), str(tmp_path / "mine"))
    assert (tmp_path / "mine").is_symlink()


def test_a_copy_inside_of_the_folder_does_not_copy_itself(tmp_path):
    (tmp_path / "a").write_text("a")
    (tmp_path / "temporary").mkdir()
    copy_folder(tmp_path, tmp_path / "temporary" / "copy")
    assert sorted(os.listdir(tmp_path / "temporary" / "copy")) == ["a"]


def test_beyond_the_limit_everything_is_a_link(tmp_path, monkeypatch):
    monkeypatch.setattr(scratch, "ENTRIES_AT_MOST", 3)
    source = tmp_path / "source"
    source.mkdir()
    for number in range(6):
        (source / f"{number}").write_text("x")
    copy_folder(source, tmp_path / "copy")
    links = [path.is_symlink() for path in (tmp_path / "copy").iterdir()]
    assert links.count(True) == 4
