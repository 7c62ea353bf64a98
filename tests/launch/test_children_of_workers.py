"""Nothing that a worker has started outlives the run, however that ends."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from tests.chaos.jobs import gone_within
from tests.launch.conftest import COMMAND, ENDED_S, PROGRAMS
from tests.promises import promise
from tests.warm import processes

from unisono.runtime.procfs import below, kill_below

pytestmark = pytest.mark.slow

PROGRAM = PROGRAMS / "leaves_children.py"


def started(folder: Path, end: str) -> tuple[subprocess.Popen[bytes], dict[str, psutil.Process]]:
    """Start two workers, each with a spawned process and a daemon; wait until all have begun."""
    command = [*COMMAND, "-n", "2", "--restarts", "0", str(PROGRAM), str(folder), end]
    out = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    launcher = processes.start(command, start_new_session=True, **out)
    found: dict[str, psutil.Process] = {}
    while len(found) < 6:
        assert launcher.poll() is None or end != "waits"
        for one in folder.glob("[a-z]*"):
            if one.name not in found and (text := one.read_text()):
                found[one.name] = psutil.Process(int(text))
        time.sleep(0.005)
    return launcher, found


@promise("nothing-lost.9")
@pytest.mark.parametrize("what", ["launcher", "worker", "server", "SIGTERM"])
def test_they_go_when_the_run_is_killed(tmp_path: Path, what: str) -> None:
    launcher, found = started(tmp_path, "waits")
    if what == "SIGTERM":
        launcher.send_signal(signal.SIGTERM)
    elif what == "launcher":
        launcher.kill()
    else:
        worker = found["worker-0"]
        (worker if what == "worker" else worker.parent()).kill()
    assert gone_within(list(found.values()), ENDED_S) == []
    launcher.wait(ENDED_S)


@pytest.mark.parametrize("end", ["raises", "leaves"])
def test_they_go_when_the_program_ends(tmp_path: Path, end: str) -> None:
    try:
        launcher, found = started(tmp_path, end)
    except psutil.NoSuchProcess:  # it is over already, and they with it
        return
    assert gone_within(list(found.values()), ENDED_S) == []
    assert launcher.wait(ENDED_S) == (end == "raises")


def test_what_is_to_outlive_the_run_is_left(tmp_path: Path) -> None:
    code = "import time; print(flush=True); time.sleep(600)"
    command = [sys.executable, "-S", "-c", code]
    mine = psutil.Process()
    env = {"UNISONO_OUTLIVES": "1"}
    with (
        subprocess.Popen(command, env=env, stdout=subprocess.PIPE) as stays,
        subprocess.Popen(command, env={"A": "1"}, stdout=subprocess.PIPE) as other,
        subprocess.Popen(command, env={"A": "2"}, stdout=subprocess.PIPE) as goes,
    ):
        for one in (stays, other, goes):
            assert one.stdout is not None
            one.stdout.readline()
        assert {stays.pid, goes.pid} <= set(below(mine.pid))
        kill_below(mine.pid, started_by={"A": "2"})
        assert goes.wait(ENDED_S) == -signal.SIGKILL
        assert (stays.poll(), other.poll()) == (None, None)
        stays.kill()
        other.kill()
