"""A signal that comes behind the last step of a loop, or between two loops, is not forgotten."""

import functools
import signal
import sys
from pathlib import Path

import pytest
from tests.warm import processes

from unisono.runtime.checkpoint.run_directory import RunDirectory

pytestmark = pytest.mark.slow

PROGRAM = Path(__file__).parent / "programs" / "short_loops.py"
ALONE, ON_TWO = (), ("-m", "unisono", "run", "-n", "2")


def train(directory, way, *where):
    return processes.run([sys.executable, *way, PROGRAM, directory, *where], cwd=directory)


@functools.cache
def undisturbed(folder):
    (line,) = train(folder, ALONE, "none", "", "0").stdout.splitlines()
    return line


@pytest.fixture(scope="module")
def digest(tmp_path_factory):
    return undisturbed(tmp_path_factory.mktemp("undisturbed"))


@pytest.mark.parametrize(
    ("way", "name", "place", "at", "step"),
    [
        (ALONE, "SIGTERM", "last step", 2, 6),
        (ALONE, "SIGINT", "last step", 2, 6),
        (ALONE, "SIGUSR1", "between", 1, 4),
        (ALONE, "SIGTERM", "evaluate", 3, 8),
        (ALONE, "SIGTERM", "break", 1, 3),
        (ALONE, "SIGTERM", "end", 6, 12),
        (ON_TWO, "SIGTERM", "last step", 2, 6),
        (ON_TWO, "SIGUSR1", "between", 1, 4),
        (ON_TWO, "SIGTERM", "end", 6, 12),
    ],
    ids=str,
)
def test_a_request_to_stop_outlives_the_loop(tmp_path, digest, way, name, place, at, step):
    done = train(tmp_path, way, name, place, str(at))
    # Python ends itself by Ctrl-C, which a shell shows as 130.
    status = -signal.SIGINT if (name, way) == ("SIGINT", ALONE) else 128 + getattr(signal, name)
    assert done.returncode == status, done
    assert done.stderr.count(f"step {step} is on the disk") == (place != "end"), done.stderr
    assert ("digest" in done.stdout) == (place == "end")
    assert next(entry.step for entry in RunDirectory(tmp_path).entries()) == step
    again = train(tmp_path, ALONE, "none", "", "0")
    assert again.stdout.splitlines() == [digest], again.stderr
