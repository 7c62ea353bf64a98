"""Accelerate, transformers and Lightning on our backend, in an environment that has them.

``make test-peers`` makes it and says where its Python is, in UNISONO_PEERS.
"""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest
from tests.test_docs import DOCS, blocks

PYTHON = os.environ.get("UNISONO_PEERS", "")
PROGRAMS = Path(__file__).parent / "programs"
SCRIPTS = "accelerate.test_utils.scripts"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(400),
    pytest.mark.skipif(
        not PYTHON, reason="Accelerate, transformers and Lightning are heavy: `make test-peers`"
    ),
]


def run_on(backend: str, workers: int, *program: object) -> str:
    """Run a program on our launcher, and return what it prints."""
    command = [PYTHON, "-m", "unisono", "run", "-n", workers, "--backend", backend, *program]
    environ = {
        **{name: value for name, value in os.environ.items() if not name.startswith("HF_")},
        "ACCELERATE_USE_CPU": "1",
        "HF_HUB_OFFLINE": "1",  # nothing is fetched
    }
    done = subprocess.run(
        list(map(str, command)), env=environ, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize(
    ("script", "workers"),
    # Its `test_script` fails with three ranks on gloo, too: it expects a row where none is left.
    [("test_script", 2), ("test_ops", 2), ("test_ops", 3), ("test_sync", 2), ("test_sync", 3)],
)
def test_accelerates_own_tests_pass(script: str, workers: int) -> None:
    run_on("unisono", workers, "-m", f"{SCRIPTS}.{script}")


@pytest.mark.parametrize("program", ["hf_trainer.py", "lightning_sync.py"])
def test_two_ranks_end_with_gloos_bits_and_three_alike(program: str, tmp_path: Path) -> None:
    def ends_of(backend: str, workers: int) -> list[str]:
        folder = tmp_path / f"{backend}-{workers}"
        output = run_on(backend, workers, PROGRAMS / program, folder)
        return sorted(line for line in output.splitlines() if line.startswith("rank "))

    ours = ends_of("unisono", 2)
    assert ours == ends_of("gloo", 2)
    assert [line.split()[:4] for line in ours] == [
        ["rank", str(rank), "of", "gloo"] for rank in range(2)
    ]
    digests = {line.split()[-1] for line in ends_of("unisono", 3)}
    assert len(digests) == 1


def test_they_count_what_the_docs_say() -> None:
    def said(workers: int) -> list[str]:
        output = run_on("gloo", workers, PROGRAMS / "counting.py")
        return re.findall(r"^(?:Accelerate|Lightning): .*$", output, re.M)

    alone = ["ones 10.0%", "gather 101, gather_for_metrics 101", "101"]
    assert [line.partition(": ")[2] for line in said(1)] == alone
    ones, accelerate, lightning = said(4)
    padding, validation = (
        (DOCS / "problems" / f"{page}.md").read_text() for page in ("padding", "validation")
    )
    assert f"({ones.split()[-1]} on four processes)" in padding
    assert accelerate == "Accelerate: gather 128, gather_for_metrics 101"
    assert "`gather` returns 128" in validation
    assert lightning == "Lightning: 104"
    assert "counts 104 samples" in validation


@pytest.mark.parametrize(
    ("page", "starter"),
    # Lightning starts its ranks itself, and transformers' page has one.
    [("accelerate", ["-m", "unisono", "run", "-n", "2"]), ("lightning", []), ("transformers", [])],
)
def test_the_program_that_the_docs_compare_with_trains(
    page: str, starter: list[str], tmp_path: Path
) -> None:
    before, _ = blocks(DOCS / "from" / f"{page}.md")
    (tmp_path / "before.py").write_text(before)
    command = [PYTHON, *starter, "before.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert len(list(tmp_path.glob("model*"))) == 1
