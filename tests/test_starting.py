"""`unisono demo` and `unisono new`: what somebody does who has never heard of Unisono."""

from __future__ import annotations

import os
import re
import resource
import signal
import sys
from pathlib import Path
from subprocess import PIPE

import pytest
from click.testing import CliRunner
from tests.test_docs import digest, needs_two_cores
from tests.warm import processes

from unisono.tools.cli import main
from unisono.tools.cli.first_commands import FIRST, RECIPES

COMMANDS = "unisono.tools.cli.first_commands"


@needs_two_cores
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_demo_has_the_digest_of_the_program_that_new_writes(tmp_path: Path) -> None:
    file = tmp_path / "my program.py"
    assert CliRunner().invoke(main, ["new", str(file)]).exit_code == 0
    alone = processes.run([sys.executable, str(file)], cwd=tmp_path, timeout=100)
    demo = processes.run([sys.executable, "-m", "unisono", "demo"], cwd=tmp_path, timeout=100)
    assert (alone.returncode, demo.returncode) == (0, 0), alone.stderr + demo.stderr
    assert re.findall(r"digest\s([0-9a-f]{16})", demo.stdout) == [digest(alone.stdout)] * 3
    assert re.findall(r"4 shards on (\d) worker", demo.stdout) == ["2", "1"]
    accuracies = re.findall(r"test accuracy ([\d.]+)%", demo.stdout)
    assert len(accuracies) == 2
    assert min(map(float, accuracies)) > 97
    said, _, advice = demo.stdout.partition("What to try next:")
    assert "Two workers and one computed the same weights, bit for bit" in said
    for name in re.findall(r"unisono ([a-z]+)", advice):
        assert name in main.commands
    assert list(tmp_path.iterdir()) == [file]


@needs_two_cores
@pytest.mark.slow
@pytest.mark.parametrize("lines", [1, 3])
def test_an_interrupted_demo_leaves_nothing(tmp_path: Path, lines: int) -> None:
    command = [sys.executable, "-m", "unisono", "demo"]
    environ = {**os.environ, "TMPDIR": str(tmp_path)}
    with processes.start(command, env=environ, stdout=PIPE, stderr=PIPE, text=True) as demo:
        for _ in range(lines):
            demo.stdout.readline()
        demo.send_signal(signal.SIGINT)
        _, complaint = demo.communicate(timeout=60)
    complaint = complaint.replace(
        "unisono: the run has no `directory`, so nothing of it is on the disk\n", ""
    )
    assert (demo.returncode, complaint, list(tmp_path.iterdir())) == (130, "", [])


@pytest.mark.parametrize("columns", [40, 100])
def test_the_demo_says_first_whether_it_has_succeeded(columns, monkeypatch) -> None:
    monkeypatch.setattr("shutil.get_terminal_size", lambda: os.terminal_size((columns, 24)))
    monkeypatch.setattr(f"{COMMANDS}.launch", lambda call, workers: ["17" * 32])
    monkeypatch.setattr(os, "environ", dict(os.environ))
    said = CliRunner().invoke(main, ["demo"])
    assert said.exit_code == 0
    assert "bit for bit: digest 1717171717171717." in " ".join(said.output.split())
    commands = [line for line in said.output.splitlines() if "UNISONO_FAULTS" not in line]
    assert max(map(len, commands)) <= max(columns, 53)  # as long as a title


def test_the_demo_fails_aloud(monkeypatch) -> None:
    monkeypatch.setattr(os, "environ", dict(os.environ))
    monkeypatch.setattr(f"{COMMANDS}.launch", lambda call, workers: [f"{workers}" * 64])
    differs = CliRunner().invoke(main, ["demo"])
    assert (differs.exit_code, "must be equal, but are 2222" in differs.stderr) == (1, True)
    monkeypatch.setattr("tempfile.tempdir", "/proc/nowhere")
    refused = CliRunner().invoke(main, ["demo"])
    assert refused.exit_code == 2
    assert refused.output.endswith("or set TMPDIR to a folder that can be written.\n")


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
        (["train.ipynb"], "FILE must end in .py, but"),
        (['q"""z.py'], 'FILE must be a name without `"""`, as its docstring has the name, but'),
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


@pytest.mark.parametrize("arguments", [["t.py"], ["cluster", "jobs"]], ids=" ".join)
def test_new_leaves_no_half_of_a_file(
    arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second attempt was refused, as the file of the first one, which was empty, existed."""
    monkeypatch.chdir(tmp_path)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, limits[1]))
    try:
        result = CliRunner().invoke(main, ["new", *arguments])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, ignored)
    assert (result.exit_code, "File too large" in result.output) == (2, True)
    assert not list(tmp_path.iterdir())
