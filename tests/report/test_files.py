"""A file that is whole, or not there; and nothing of anybody else's is overwritten."""

import os
from pathlib import Path

import pytest

from unisono.tools.report.files import _names, write_page
from unisono.tools.report.page import MARK


def write(path, page=MARK + "page"):
    return write_page(path, page)


def test_a_file_is_written_and_written_again(tmp_path):
    path = tmp_path / "a page.html"
    assert write(path) == path
    write(path, MARK + "newer")
    assert path.read_text() == MARK + "newer"
    assert os.listdir(tmp_path) == ["a page.html"]
    (tmp_path / "usual").touch()
    assert path.stat().st_mode == (tmp_path / "usual").stat().st_mode


@pytest.mark.parametrize("content", ["import torch\n", MARK[:-1], "\x00"])
def test_what_is_not_ours_is_kept(tmp_path, content):
    path = tmp_path / "train.py"
    path.write_text(content)
    with pytest.raises(ValueError, match="`-o` must name a new file, or one that this command"):
        write(path)
    assert path.read_text() == content


def test_an_empty_file_holds_nothing_to_lose(tmp_path):
    path = tmp_path / "page.html"
    path.touch()
    write(path)
    assert path.read_text() == MARK + "page"


def test_a_link_is_followed(tmp_path):
    (tmp_path / "real.html").write_text(MARK)
    link = tmp_path / "link.html"
    link.symlink_to("real.html")
    assert write(link) == tmp_path / "real.html"
    assert link.is_symlink()


def test_a_folder_and_a_pipe_are_refused(tmp_path):
    with pytest.raises(ValueError, match="is a folder: name a file in it"):
        write(tmp_path)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ValueError, match="is something else"):
        write(tmp_path / "pipe")


@pytest.mark.parametrize("name", ["none/page.html", "file/page.html"])
def test_a_folder_that_is_none_is_told(tmp_path, name):
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match="must name a file that can be written"):
        write(tmp_path / name)


def test_a_failure_midway_leaves_the_earlier_file(tmp_path, monkeypatch):
    path = write(tmp_path / "page.html")

    def fails(*files):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", fails)
    with pytest.raises(ValueError, match=r"cannot \(No space left on device\)"):
        write(path, MARK + "newer")
    assert path.read_text() == MARK + "page"
    assert os.listdir(tmp_path) == ["page.html"]


@pytest.mark.parametrize(
    ("folders", "names"),
    [
        (["/a/one", "/a/two"], ["one", "two"]),
        (["/a/run", "/b/run"], ["/a/run", "/b/run"]),
    ],
)
def test_runs_are_named_apart(folders, names):
    assert _names([Path(folder) for folder in folders]) == names
