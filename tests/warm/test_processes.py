"""A program that is forked finds and leaves what one in a new interpreter does."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.warm import processes

pytestmark = pytest.mark.slow

SHOW = r"""
import os, signal, sys
if __name__ == "__main__":
    print(sys.argv, sys.path, os.getcwd(), *sorted(os.environ.items()), sep="\n")
    print(os.getsid(0) == os.getpid(), sorted(os.listdir("/proc/self/fd")), sys.stdin.read())
    print([signal.getsignal(each) for each in signal.valid_signals()])
    print(signal.pthread_sigmask(signal.SIG_BLOCK, []))
"""
COMMANDS = {
    "script": ["a folder/show.py", "--x", "y z"],
    "module": ["-m", "package.show", "-m"],
    "code": ["-c", SHOW, "-c"],
}


@pytest.mark.parametrize("form", COMMANDS)
def test_a_program_finds_what_a_new_interpreter_would_show(tmp_path: Path, form: str) -> None:
    for name in ("a folder", "package"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "show.py").write_text(SHOW)
    command = [sys.executable, *COMMANDS[form]]
    # readline, which pytest loads, puts variables where os.environ does not see them.
    options = {"cwd": tmp_path, "env": dict(os.environ), "stdin": subprocess.DEVNULL}
    options["start_new_session"] = True
    theirs = subprocess.run(command, capture_output=True, text=True, **options)
    ours = processes.run(command, **options)
    assert ours.stderr == theirs.stderr == ""
    assert ours.stdout.splitlines() == theirs.stdout.splitlines()
