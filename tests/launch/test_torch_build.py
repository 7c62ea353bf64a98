"""For what torch is built, read without loading it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from unisono.runtime.launch.placement import torch_for_cpus_alone

LOADS = """
import sys
from unisono.runtime.launch.placement import torch_for_cpus_alone
for sys.path[0] in sys.argv[1:]:
    print(repr(torch_for_cpus_alone()), "torch" in sys.modules)
"""
FILES: list[tuple[list[str] | None, str]] = [
    (["__version__ = '9.1+cpu'", "cuda = None", "hip = None"], "9.1+cpu"),
    (["cuda = None"], "without a version"),
    (["__version__ = '9.1'", "cuda = '13.0'", "hip = None"], ""),
    (["__version__ = '9.1'", "cuda = None", "hip = '7.0'"], ""),
    (["__version__ = '9.1'"], ""),
    (["raise OSError"], ""),
    (None, ""),
]


@pytest.mark.slow
def test_it_is_what_its_file_says(tmp_path: Path) -> None:
    for number, (lines, _) in enumerate(FILES):
        folder = tmp_path / str(number) / "torch"
        folder.mkdir(parents=True)
        (folder / "__init__.py").write_text("raise AssertionError('it was loaded')")
        if lines is not None:
            (folder / "version.py").write_text("\n".join(lines))
    command = [sys.executable, "-c", LOADS, *(tmp_path / str(n) for n in range(len(FILES)))]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == [f"{expected!r} False" for _, expected in FILES]


def test_it_agrees_with_torch() -> None:
    is_for_gpus = torch.version.cuda is not None or torch.version.hip is not None
    assert torch_for_cpus_alone() == ("" if is_for_gpus else torch.__version__)


def test_where_there_is_none_nobody_knows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert torch_for_cpus_alone() == ""
