"""`unisono demo` and `unisono new`: what somebody does who has never heard of Unisono."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner
from tests.test_docs import digest, needs_two_cores
from tests.warm import processes

from unisono.tools.cli import main
from unisono.tools.cli.new_command import FIRST, RECIPES


@needs_two_cores
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_demo_has_the_digest_of_the_program_that_new_writes(tmp_path: Path) -> None:
    file = tmp_path / "my program.py"
    assert CliRunner().invoke(main, ["new", str(file)]).exit_code == 0
    alone = processes.run([sys.executable, str(file)], cwd=tmp_path, timeout=100)
    demo = processes.run([sys.executable, "-m", "unisono", "demo"], cwd=tmp_path, timeout=100)
    assert (alone.returncode, demo.returncode) == (0, 0), alone.stderr + demo.stderr
    assert digest(alone.stdout) == digest(demo.stdout)
    assert "4 shards on 2 workers" in demo.stdout
    (accuracy,) = re.findall(r"test accuracy ([\d.]+)%", demo.stdout)
    assert float(accuracy) > 97
    _, _, advice = demo.stdout.partition("What to try next:")
    for name in re.findall(r"unisono ([a-z]+)", advice):
        assert name in main.commands
    assert list(tmp_path.iterdir()) == [file]


def test_new_names_its_file_as_a_shell_takes_it(tmp_path: Path) -> None:
    file = tmp_path / "my program.py"
    said = CliRunner().invoke(main, ["new", str(file)]).output
    assert f"\n  python '{file}' " in said
    text = file.read_text()
    assert f"unisono run -n 2 '{file}' " in text
    assert text.replace(f"'{file}'", f"{FIRST}.py") == (RECIPES / f"{FIRST}.py").read_text()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["there.py"], "FILE must be new, but"),
        (["gan", "there.py"], "FILE must be new, but"),
        (["cluster", "there.py"], "FILE must be new, but"),
        (["gan", "there.ipynb"], "FILE must end in .py, but is 'there.ipynb': use 'there.py'."),
        (["train"], "NAME must be a recipe, or a file that ends in .py, but"),
        (["contrast"], "but is 'contrast': use `unisono new contrastive`, or"),
        (["train.ipynb"], "FILE must end in .py, but"),
        (["nowhere/train.py"], "FILE must be a place to write to, but"),
    ],
)
def test_new_replaces_nothing(
    arguments: list[str], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("there.py").write_text("mine")
    result = CliRunner().invoke(main, ["new", *arguments])
    assert result.exit_code == 2
    assert result.output.startswith("unisono: ")
    assert words in result.output
    assert result.output.count("\n") == 1
    assert [path.read_text() for path in tmp_path.iterdir()] == ["mine"]
