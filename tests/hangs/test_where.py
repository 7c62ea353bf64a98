"""`unisono where`: asked of a launcher, a worker, a loader process, a folder, another launcher."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from tests.hangs.planted import PROGRAMS, Planted
from tests.warm import processes

from unisono.runtime.hangs.where import find_job, where
from unisono.runtime.workers.control_block import ControlBlock


def ask(target: object, folder: Path | None = None) -> subprocess.CompletedProcess[str]:
    return processes.run([sys.executable, "-m", "unisono", "where", target], cwd=folder)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Planted, Path]]:
    """A run of two workers that has just got stuck, and its directory."""
    folder = tmp_path_factory.mktemp("a run")
    planted = Planted("trained", "asleep", 2, folder, more=[str(folder / "run 1")])
    planted.begin()
    try:
        until_s = time.monotonic() + 60
        while not planted.note.exists() and time.monotonic() < until_s:
            time.sleep(0.01)
        yield planted, folder / "run 1"
    finally:
        planted.end()


SUMMARY = (
    r"Step \d+ waits\. Rank 1 has not arrived at the sum of gradients: it is in `sleep_long`, "
    r"ways\.py:\d+ \(loading sample \d+\)\. Rank 0 waits for it\.\n"
    r"rank 0 \(process \d+, step \d+\) waits for others in the sum of gradients \(`main`, trained\."
)


@pytest.mark.slow
def test_a_job_is_found_by_any_of_its_processes_and_by_its_folder(
    run: tuple[Planted, Path],
) -> None:
    planted, directory = run
    launcher = psutil.Process(planted.pid)
    family = [launcher, *launcher.children(recursive=True)]
    assert len(family) == 4
    until_s = time.monotonic() + 20
    while "has not arrived" not in where(planted.pid) and time.monotonic() < until_s:
        time.sleep(0.05)  # the other one is on its way to the meeting
    for process in family:
        assert re.match(SUMMARY, where(process.pid))
    done = ask(directory, PROGRAMS)
    assert (done.returncode, done.stderr) == (0, "")
    assert re.match(SUMMARY, done.stdout), done.stdout
    assert "  sleep_long  ways.py:" in done.stdout


LAUNCHER = """
import os, subprocess, sys
program = "import time\\ndef wait_here():\\n    time.sleep(99)\\nwait_here()"
for rank in "01":
    subprocess.Popen([sys.executable, "-c", program], env={**os.environ, "RANK": rank})
os.wait()
"""


@pytest.mark.slow
def test_ranks_of_another_launcher_are_known_by_their_environment() -> None:
    launcher = psutil.Popen([sys.executable, "-c", LAUNCHER])
    ranks = []
    try:
        until_s = time.monotonic() + 30
        while len(ranks) < 2 and time.monotonic() < until_s:
            ranks = launcher.children()
            time.sleep(0.05)
        while where(launcher.pid).count("`wait_here`") < 2 and time.monotonic() < until_s:
            time.sleep(0.05)
        ranks.sort(key=lambda one: one.environ()["RANK"])
        for target in (launcher, ranks[1]):
            assert re.fullmatch(
                rf"rank 0 \(process {ranks[0].pid}\) is in `wait_here`, <string>:3\n.*"
                rf"rank 1 \(process {ranks[1].pid}\) is in `wait_here`, <string>:3\n.*",
                where(target.pid),
                re.S,
            )
    finally:
        for process in (*ranks, launcher):
            process.kill()
            process.wait()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("target", "words"),
    [
        ("999999999", "PID must be a process that runs and that you may look into, but 9999"),
        ("no/such/folder", "DIRECTORY must be a run's folder, but 'no/such/folder' is none"),
        (".", "DIRECTORY must be that of a run that is running on this machine, but nothing"),
    ],
)
def test_what_cannot_be_looked_at_is_refused(tmp_path: Path, target: str, words: str) -> None:
    done = ask(target, tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"unisono: {words}")


def test_a_process_by_itself_is_looked_at() -> None:
    with psutil.Popen([sys.executable, "-S", "-c", "input()"], stdin=subprocess.PIPE) as process:
        assert find_job(process.pid).pids == {0: process.pid}
        process.kill()


def test_a_launcher_whose_workers_start_is_no_rank() -> None:
    code = f"from {ControlBlock.__module__} import *; c = ControlBlock.create(2); print(); input()"
    command = [sys.executable, "-u", "-c", code]
    with psutil.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        process.stdout.readline()
        with pytest.raises(ValueError, match="PID must be of a job whose workers run, but those"):
            find_job(process.pid)
        process.kill()
