"""A file that is whole, or not there; and nothing of anybody else's is overwritten."""

import os

import pytest

from unisono.tools.report.files import write_page


def test_a_file_is_written_and_written_again(tmp_path):
    path = tmp_path / "a page.html"
    assert write_page(path, "page") == path
    write_page(path, "newer")
    assert path.read_text() == "newer"
    assert os.listdir(tmp_path) == ["a page.html"]
    (tmp_path / "usual").touch()
    assert path.stat().st_mode == (tmp_path / "usual").stat().st_mode


def test_what_a_link_leads_to_is_kept(tmp_path):
    (tmp_path / "train.py").write_text("import torch")
    (tmp_path / "page.html").symlink_to("train.py")
    write_page(tmp_path / "page.html", "page")
    assert (tmp_path / "train.py").read_text() == "import torch"


@pytest.mark.parametrize("name", ["none/page.html", "file/page.html", "folder.html"])
def test_a_place_that_takes_no_file_is_told(tmp_path, name):
    (tmp_path / "file").touch()
    (tmp_path / "folder.html").mkdir()
    with pytest.raises(ValueError, match="must name a file that can be written"):
        write_page(tmp_path / name, "page")
