"""Workers' outputs lead where the caller's own ``print`` leads."""

from __future__ import annotations

import contextlib
import io
import math
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from tests.descriptors import none_stay_open
from tests.warm import processes

import unisono
from unisono.runtime.launch.outputs import LineBuffer, Outputs
from unisono.runtime.procfs import started_at


def speak(words: str) -> None:
    print(words)
    print(words.upper(), file=sys.stderr)


def test_whole_lines_are_shown_at_once_and_the_rest_when_nothing_follows():
    stream = LineBuffer("utf-8")
    assert stream.feed(b"one\ntwo", 10.0) == "one\n"
    assert stream.due_s == pytest.approx(10.1)
    assert stream.feed(b"\nthree", 10.05) == "two\n"
    assert stream.due_s == pytest.approx(10.15)
    assert stream.take() == "three"
    assert stream.due_s == math.inf


def test_what_grows_without_a_pause_is_shown_too():
    stream = LineBuffer("utf-8")
    for dot in range(3):
        assert stream.feed(b".", 10.0 + 0.04 * dot) == ""
    assert stream.due_s == pytest.approx(10.1)
    assert stream.take() == "..."
    assert stream.feed(b".", 10.12) == ""
    assert stream.due_s == pytest.approx(10.22)


def test_a_progress_bar_that_writes_over_itself_is_shown_frame_by_frame():
    stream = LineBuffer("utf-8")
    assert stream.feed(b"\r 1%", 0.0) == "\r"
    assert stream.feed(b"\r 2%", 0.0) == " 1%\r"


def test_characters_that_are_cut_by_a_read_are_whole_again():
    stream = LineBuffer("utf-8")
    data = "ä€😀\n".encode()
    assert "".join(stream.feed(data[i : i + 1], 0.0) for i in range(len(data))) == "ä€😀\n"
    assert stream.feed(b"\xff\n", 0.0) == "\ufffd\n"
    assert stream.feed("€".encode()[:2], 0.0) == ""
    assert stream.take(final=True) == "\ufffd"


@pytest.mark.slow
def test_redirected_streams_get_what_workers_print():
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        print("before")
        unisono.launch(speak, "ä", workers=2)
        print("after")
    assert out.getvalue() == "before\nä\nä\nafter\n"
    assert err.getvalue() == "Ä\nÄ\n"


class Failing(io.StringIO):
    """A stream whose disk is full for its first writes, and whose flush never works.

    Whoever prints can see in a folder which words have come.
    """

    def __init__(self, failures: int, folder: Path | None = None) -> None:
        super().__init__()
        self.failures, self.folder = failures, folder

    def write(self, text: str) -> int:
        for word in text.split() if self.folder else ():
            (self.folder / word).touch()
        if self.failures:
            self.failures -= 1
            raise OSError(28, "No space left on device")
        return super().write(text)

    def flush(self) -> None:
        raise RuntimeError("no flush")


def speak_thrice(folder: Path) -> int:
    for word in ("one", "two", "three"):
        print(word, flush=True)
        end_s = time.monotonic() + 60
        while not (folder / word).exists() and time.monotonic() < end_s:
            time.sleep(0.001)  # what comes at once is written at once
    return 7


@pytest.mark.slow
def test_a_stream_that_raises_ends_no_job_and_is_told_once(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    told, out = io.StringIO(), Failing(2, tmp_path)
    monkeypatch.setattr(sys, "__stderr__", told)
    with contextlib.redirect_stdout(out):
        assert unisono.launch(speak_thrice, tmp_path, workers=1) == [7]
    assert out.getvalue() == "three\n"
    (line,) = told.getvalue().splitlines()
    assert "sys.stdout must take what workers print" in line
    assert "raised OSError: [Errno 28] No space left on device" in line


@pytest.mark.slow
def test_what_leads_to_a_descriptor_is_written_by_workers_themselves(tmp_path: Path):
    """So a script's workers still find a terminal where the script has one."""
    program = tmp_path / "program.py"
    program.write_text(
        "import os, unisono\n"
        "print('before')\n"
        "links = unisono.launch(lambda: print('worker') or os.readlink('/proc/self/fd/1'))\n"
        "print(set(links) == {os.readlink('/proc/self/fd/1')})\n"
    )
    output = tmp_path / "output"
    with output.open("w") as file:
        processes.run([sys.executable, program], stdout=file, check=True)
    assert sorted(set(output.read_text().split())) == ["True", "before", "worker"]
    assert output.read_text().startswith("before")


@pytest.mark.slow
def test_a_program_that_outlives_its_worker_holds_nobody_up_and_ends_with_the_job():
    def leave_one_behind() -> int:
        return subprocess.Popen(["sleep", "600"], start_new_session=True).pid

    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        (pid,) = unisono.launch(leave_one_behind, workers=1)
    assert started_at(pid) is None


class WithoutDescriptor(io.StringIO):
    """A stream of a program whose class says so in a way of its own."""

    def fileno(self) -> Any:
        return None


@pytest.mark.parametrize("stream", [io.StringIO(), Failing(9), WithoutDescriptor()])
def test_closing_gives_all_descriptors_back(stream: io.StringIO):
    with contextlib.redirect_stdout(stream), none_stay_open():
        outputs = Outputs()
        with contextlib.ExitStack() as theirs:
            for fd in outputs.standard_fds():
                theirs.enter_context(open(fd, "wb"))
        outputs.close()
