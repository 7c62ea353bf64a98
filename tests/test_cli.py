"""The command line refuses wrong input in one sentence, before anything is started."""

from __future__ import annotations

import contextlib
import errno
import os
import subprocess
import sys
from pathlib import Path
from typing import NoReturn

import pytest
from click.testing import CliRunner
from tests.report.synthetic import write_run

import unisono
from unisono.tools.cli import main, views
from unisono.tools.doctor import machine_checks


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["-n", "0", "x.py"], "`-n` must be a whole number of at least 1, but is '0'"),
        (["-n", "-1", "x.py"], "`-n` must be a whole number of at least 1, but is '-1'"),
        (["-n", "x", "x.py"], "`-n` must be a whole number of at least 1, but is 'x'"),
        (["--threads", "0", "x.py"], "`--threads` must be a whole number of at least 1"),
        (
            ["--threads", "65537", "x.py"],
            "`--threads` must be a whole number of at least 1, at most",
        ),
        (["-n", "100000", __file__], "there must be at most"),
        (["--restarts", "-1", "x.py"], "`--restarts` must be a whole number of at least 0"),
        (["--restarts", "2.5", "x.py"], "`--restarts` must be a whole number of at least 0"),
        (["--stall-timeout", "0", "x.py"], "`--stall-timeout` must be a number of seconds above 0"),
        (["--stall-timeout", "1e300", "x.py"], "`--stall-timeout` must be a number of seconds ab"),
        (["--stall-timeout", "nan", "x.py"], "`--stall-timeout` must be a number of seconds above"),
        (["--workers-per-gpu", "0", __file__], "`--workers-per-gpu` must be a whole number of at"),
        (["--backend", "nccl", __file__], "`--backend` or `backend` must be gloo or"),
        (["nowhere.py"], "SCRIPT must be a Python file, but 'nowhere.py' does not exist here"),
        (["."], "SCRIPT must be a Python file, but '.' is no plain file"),
        (["/dev/null"], "SCRIPT must be a Python file, but '/dev/null' is no plain file"),
        ([], "SCRIPT must be a Python file, but none is named"),
        (["-m"], "SCRIPT must be a Python file, but none is named"),
    ],
)
def test_wrong_input_gets_one_sentence_and_status_2(arguments: list[str], words: str) -> None:
    result = CliRunner().invoke(main, ["run", *arguments])
    assert result.exit_code == 2
    assert result.output.startswith(f"unisono: {words}")
    assert result.output.count("\n") == 1


def test_a_folder_that_has_been_removed_gets_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    result = CliRunner().invoke(main, ["run", __file__])
    assert result.exit_code == 2
    assert result.output.startswith("unisono: a program must be started in a folder that exists")


def test_checkpoints_that_cannot_be_listed_are_told_in_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").mkdir()
    (tmp_path / "file" / "checkpoints").touch()
    (tmp_path / "link").mkdir()
    (tmp_path / "link" / "checkpoints").symlink_to(tmp_path)
    for name, words in (
        ("file", "must be readable, but: [Errno 20] Not a"),
        ("link", "must be a folder, but is a"),
    ):
        result = CliRunner().invoke(main, ["checkpoints", str(tmp_path / name)])
        assert (result.exit_code, result.output.count("\n")) == (2, 1)
        assert words in result.output


def commands_that_print(folder: Path) -> list[list[str]]:
    run = str(write_run(folder))
    compare = ["compare", run, run, "-o", str(folder / "page.html")]
    return [["checkpoints", run], ["top", "--once", run], ["report", run], compare]


@pytest.mark.parametrize(
    "arguments", [["top", "--once"], ["report"], ["compare", "run"], ["checkpoints"]]
)
def test_a_run_of_somebody_else_is_refused_in_one_sentence(
    arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_run(tmp_path / "run")
    (tmp_path / "run" / "checkpoints").mkdir(exist_ok=True)
    monkeypatch.chdir(tmp_path)
    opened = os.open

    def refuse(path: str, *rest: int, **more: int) -> int:
        if str(path).endswith("events.jsonl") or "checkpoints" in str(path):
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return opened(path, *rest, **more)

    def hidden(path: Path) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr(os, "open", refuse)
    monkeypatch.setattr(Path, "iterdir", hidden)
    done = CliRunner().invoke(main, [*arguments, "run"])
    assert done.exit_code == 2, done
    assert "Permission denied" in done.stderr
    assert done.stderr.count("\n") == 1, done.stderr


def test_a_remedy_quotes_the_path_in_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "runs" / "a é").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    said = CliRunner().invoke(main, ["where", "runs/a é"]).stderr
    assert "`unisono top --once 'runs/a é'` shows how it ended" in said


def test_a_full_output_is_told_in_one_sentence() -> None:
    with open("/dev/full", "w") as full:
        command = [sys.executable, "-m", "unisono", "explain", "CheckpointError"]
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 2
    assert "the system says 'No space left on device': make room there." in done.stderr
    assert done.stderr.count("\n") == 1, done.stderr


def status_unread(arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> object:
    """Return the exit status of a command whose output goes to a pipe that nobody reads."""
    reading, writing = os.pipe()
    os.close(reading)
    pipe = open(writing, "w")  # noqa: SIM115
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", pipe)
        with pytest.raises(SystemExit) as ended:
            main(arguments)
    with contextlib.suppress(BrokenPipeError):
        pipe.close()
    return ended.value.code


@pytest.mark.slow
def test_a_pipe_that_nobody_reads_ends_a_command_quietly(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for arguments in commands_that_print(tmp_path):
        assert status_unread(arguments, monkeypatch) == 1
        assert capsys.readouterr().err == ""


@pytest.mark.parametrize("more", [[], ["--json"]])
def test_the_answer_of_a_command_is_its_status_even_if_nobody_reads_it(
    more: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(environ: object) -> NoReturn:
        raise OverflowError("planted")

    monkeypatch.setattr(views, "leave", sys.exit)
    for examine, status, words in ((lambda environ: [], 0, ""), (fail, 2, "planted")):
        monkeypatch.setattr(machine_checks, "examine", examine)
        assert status_unread(["doctor", *more], monkeypatch) == status
        assert words in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("FAULTS", "kil:rank=1", "in `UNISONO_FAULTS`, each row must be like `kill:"),
        ("THREADS", "many", "`UNISONO_THREADS` must be a whole number"),
    ],
)
def test_the_environment_is_checked(
    name: str, value: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(f"UNISONO_{name}", value)
    result = CliRunner().invoke(main, ["run", "-n", "1", __file__])
    assert result.exit_code == 2
    assert result.output.startswith(f"unisono: {words}")


def test_version_and_help_say_what_one_wants_to_know() -> None:
    assert unisono.__version__ in CliRunner().invoke(main, ["--version"]).output
    project = (Path(__file__).parents[1] / "pyproject.toml").read_text()
    assert f'version = "{unisono.__version__}"' in project
    text = CliRunner().invoke(main, ["--help"]).output
    for words in ("unisono run -n 2 train.py", "unisono top runs/", "unisono report runs/"):
        assert words in text
    for command in main.commands:
        text = CliRunner().invoke(main, [command, "--help"]).output
        assert f"  unisono {command} " in text, "every command has an example"
    text = CliRunner().invoke(main, ["run", "--help"]).output
    for words in ("-n WORKERS", "--threads", "Exit status", "unisono run -n 4 train.py"):
        assert words in text
    for words in ("--workers-per-gpu 2 train.py", "CUDA_VISIBLE_DEVICES= unisono run train.py"):
        assert words in text


@pytest.mark.slow
def test_the_launcher_loads_neither_torch_nor_what_else_takes_long() -> None:
    code = (
        "import sys, unisono.tools.cli; "
        "print({'torch', 'numpy', 'rich', 'cloudpickle'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"


@pytest.mark.slow
def test_what_only_trains_loads_nothing_of_commands_and_reports() -> None:
    script = Path(__file__).parents[1] / "bench" / "first_step.py"
    code = (
        "import runpy, sys; from unisono.runtime.launch.forkserver import load; load(); "
        f"runpy.run_path({str(script)!r}, run_name='__main__'); "
        "names = {'click', 'jinja2', 'matplotlib', 'pandas', 'plotly', 'psutil', 'scipy'}; "
        "names |= {'sklearn', 'torchmetrics', 'unisono.tools'}; "
        "print(names & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "set()"
