"""The wheel is enough: it runs the README's first program where there is nothing else."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from importlib.metadata import Distribution, distribution
from pathlib import Path

import pytest
from tests.test_docs import README, REPOSITORY, blocks, digest

from unisono.tools.cli.first_commands import recipes

NEW = """
import sys
from unisono.tools.cli import main

for name in sys.argv[1:]:
    main(["new", name], standalone_mode=False)
"""
OPTIONAL = ("sklearn", "plotly", "tensorboard", "torchmetrics", "pytest")


def command(*words: object, folder: Path) -> str:
    done = subprocess.run(
        list(map(str, words)), cwd=folder, capture_output=True, text=True, timeout=900
    )
    assert done.returncode == 0, f"{words}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def build(folder: Path, *options: str) -> Path:
    """Build the wheel from a copy: setuptools leaves folders behind where it works."""
    source = folder / "source"
    ignored = shutil.ignore_patterns("*.egg-info", "__py*")
    for name in ("src", "examples"):  # with links, of which one leads to a page
        shutil.copytree(REPOSITORY / name, source / name, symlinks=True, ignore=ignored)
    (source / "docs").mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE", "docs/errors.md"):
        shutil.copy(REPOSITORY / name, source / name)
    options = ("--no-isolation", "--outdir", str(folder), *options)
    command(sys.executable, "-m", "build", *options, source, folder=folder)
    (wheel,) = folder.glob("*.whl")
    return wheel


def required(name: str, found: dict[str, Distribution]) -> dict[str, Distribution]:
    """Find what a package needs without extras, and what that needs."""
    if name not in found:
        found[name] = distribution(name)
        for line in found[name].requires or []:
            if ";" not in line:
                required(re.split(r"[^\w.-]", line)[0], found)
    return found


def environment(folder: Path, wheel: Path) -> Path:
    """Make one with the wheel and links to what it requires; return its Python."""
    command(sys.executable, "-m", "venv", "--without-pip", folder, folder=folder.parent)
    (packages,) = folder.glob("lib/python*/site-packages")
    shutil.unpack_archive(wheel, packages, "zip")
    found = required("unisono", {})
    for package in [each for name, each in found.items() if name != "unisono"]:
        for top in {path.parts[0] for path in package.files or ()} - {"..", "__pycache__"}:
            if not (packages / top).exists():
                (packages / top).symlink_to(Path(str(package.locate_file(top))))
    return folder / "bin" / "python"


def check(python: Path, folder: Path, *, is_whole: bool) -> None:
    """Train from another folder, on one worker and on two, and draw on nothing optional."""
    folder.mkdir()
    missing = f"import importlib.util as u; print(any(map(u.find_spec, {OPTIONAL})))"
    assert command(python, "-c", missing, folder=folder) == "False\n"
    where = command(python, "-c", "import unisono; print(unisono.__file__)", folder=folder)
    assert Path(where).is_relative_to(python.parents[1])
    said = command(python, "-m", "unisono", "explain", "MismatchError", folder=folder)
    assert "All ranks must call it." in said
    (folder / "train.py").write_text(blocks(README)[0])
    together = command(python, "-m", "unisono", "run", "-n", 2, "train.py", folder=folder)
    if is_whole:
        assert digest(command(python, "train.py", folder=folder)) == digest(together)
    command(python, "-c", NEW, *recipes(), folder=folder)
    for name, (path, _) in recipes().items():
        if path.is_dir():
            assert len([*(folder / name).iterdir()]) == len([*path.iterdir()])
        else:
            assert (folder / path.name).is_file()


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_wheel_trains_with_required_packages_alone(tmp_path: Path) -> None:
    check(
        environment(tmp_path / "empty", build(tmp_path, "--wheel")),
        tmp_path / "elsewhere",
        is_whole=False,
    )


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_pip_installs_the_wheel_into_an_empty_environment(tmp_path: Path) -> None:
    wheel = build(tmp_path)  # from the source distribution
    command(sys.executable, "-m", "venv", tmp_path / "empty", folder=tmp_path)
    python = tmp_path / "empty" / "bin" / "python"
    pins = ("-c", REPOSITORY / "constraints.txt")
    command(python, "-m", "pip", "install", "--quiet", *pins, wheel, folder=tmp_path)
    check(python, tmp_path / "elsewhere", is_whole=True)
