"""What py-spy sees of processes that compute in C."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import pytest

from unisono.runtime.hangs.stacks import sample

HOLDING = """
import re, sys, threading
def hold():
    print(flush=True)
    re.match("(a+)+$", "a" * 60 + "b")
def wait():
    threading.Event().wait()
if sys.argv[1] == "first":
    hold()
threading.Thread(target=hold, daemon=True).start()
wait()
"""


@pytest.mark.slow
@pytest.mark.parametrize("which", ["first", "another"])
def test_who_holds_pythons_lock_in_c_is_seen_with_its_line(which: str) -> None:
    process = subprocess.Popen([sys.executable, "-c", HOLDING, which], stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None
        process.stdout.readline()
        until_s, places = time.monotonic() + 30, [("", 0)]
        while ("hold", 5) not in places and time.monotonic() < until_s:
            seen = sample([process.pid], 10)[process.pid]
            frames = seen.holder if which == "another" else seen.stack
            places = [(frame.name, frame.line) for frame in frames]
        assert ("hold", 5) in places
        status = os.waitid(os.P_PID, process.pid, os.WEXITED | os.WSTOPPED | os.WNOHANG)
        assert status is None
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
