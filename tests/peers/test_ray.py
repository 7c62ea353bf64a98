"""Runs under Ray Train, in a namespace where Ray can listen on loopback only and ends with its job.

``make test-peers`` makes an environment with Ray and says where its Python is, in UNISONO_PEERS.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

PYTHON = os.environ.get("UNISONO_PEERS", "")
PROGRAM = Path(__file__).parent / "programs" / "ray_runs.py"
EXAMPLES = Path(__file__).resolve().parents[2] / "examples" / "cluster"
ALONE = ["unshare", "--net", "--pid", "--fork", "--kill-child", "--mount-proc"]
UP = ["sh", "-c", 'ip link set lo up && exec "$@"', "sh"]
QUICK = {
    "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.2",
    "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": "40",
}

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not PYTHON, reason="Ray is heavy: `make test-peers`"),
    pytest.mark.skipif(os.geteuid() != 0, reason="a network of its own needs root"),
]


@pytest.fixture
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="ray-") as name:  # Ray's sockets need a short path
        yield Path(name)


def run(folder: Path, program: Path, *arguments: object) -> str:
    away = {"HOME": str(folder), "RAY_TMPDIR": str(folder), "RAY_AUTH_MODE": "disabled"}
    done = subprocess.run(
        [*ALONE, *UP, PYTHON, str(program), *map(str, arguments)],
        env={**os.environ, **QUICK, **away, "RAY_USAGE_STATS_ENABLED": "0"},
        capture_output=True,
        text=True,
        timeout=850,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def digests(*command: object) -> list[str]:
    """Return what a program ends with in plain Python."""
    done = subprocess.run([PYTHON, *map(str, command)], capture_output=True, text=True, check=True)
    return re.findall(r"steps, .*digest (\w{16})", done.stdout + done.stderr)


def of(name: str, folder: Path) -> Any:
    return json.loads(run(folder, PROGRAM, folder, name).splitlines()[-1])


def test_a_killed_worker_costs_no_bits_and_metrics_arrive(folder: Path) -> None:
    done = of("killed", folder)
    assert done["metrics"]["digest"][:16] == digests(PROGRAM, "plain")[0]
    wanted = {"step", "epoch", "train/loss", "validation/loss", "digest"}
    assert (done["metrics"].keys(), done["rows"][-1]) == (wanted, 24)
    # The folder was another one after the kill: it went on from Ray's copy.
    assert done["steps"][10][0] in ("4", "8")


def test_a_node_that_goes_and_comes_changes_no_bits(folder: Path) -> None:
    done = of("elastic", folder)
    assert done["metrics"]["digest"][:16] == digests(PROGRAM, "plain")[0]
    # Workers in all, and those of the first of two hosts.
    sizes = [(int(all_of_them), int(here)) for _, all_of_them, here in done["steps"]]
    assert {sizes[0], sizes[-1]} == {(3, 2)}
    assert (2, 2) in sizes


def test_each_trial_of_tune_has_its_plain_digest(folder: Path) -> None:
    assert [digest[:16] for digest in of("tune", folder)] == digests(PROGRAM, "plain")


def test_shards_of_ray_data_are_refused_and_errors_are_found(folder: Path) -> None:
    error = of("data", folder)["error"]
    assert "RuntimeError: 4 are refused" in error
    assert error.count("TypeError: the dataset must be the same on every worker") == 3


def test_the_example_has_the_digest_of_the_plain_program(folder: Path) -> None:
    (digest,) = digests(EXAMPLES / "train.py")
    options = ("--workers", 1, 2, "--storage", folder / "storage")
    assert f"'digest': '{digest}" in run(folder, EXAMPLES / "train_ray.py", *options)
