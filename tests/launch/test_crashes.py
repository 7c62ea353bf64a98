"""Programs that crash: the first ten lines have the cause, and no other worker's failure."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from tests.warm import processes

pytestmark = pytest.mark.slow

PROGRAM = Path(__file__).parent / "programs" / "crash.py"
AT_ONCE = 6
RAISED = r"It was raised on worker 1 of 2"
ORIGINAL = rf"^unisono: ArithmeticError: .*the original\n.*{RAISED}"
PLACE = r"This was in step \d, in the {} pass of shard 1, over samples \d+(, \d+){{3}}\."
FORWARD, BACKWARD = PLACE.format("forward"), PLACE.format("backward")

Case = tuple[str, str, str, str]
Kind = tuple[str, str, str]
End = tuple[int, str]
CASES: list[Case] = [
    ("load raise", "ddp", "", ORIGINAL),
    ("load raise", "ddp", "loader", ORIGINAL),
    ("load vanish", "ddp", "", r"Worker 1 had come to the end of the program by then: every"),
    (
        "forward raise",
        "unisono",
        "",
        rf"^unisono: ArithmeticError: the original\n{FORWARD}\n{RAISED}",
    ),
    ("backward", "unisono", "", rf"^unisono: ArithmeticError: the original\n{BACKWARD}\n{RAISED}"),
    ("forward kill", "ddp", "", r"worker 1 of 2 was killed by SIGKILL"),
    # Rank 0 comes to it as well, as it rehearses as rank 1.
    ("forward bus", "unisono", "", r"worker [01] of 2( \(.*\))? was killed by SIGBUS"),
]


def start(way: str, kind: str, more: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "unisono", "run", "-n", "2", "--restarts", "0"]
    return processes.start(
        [*command, str(PROGRAM), way, kind, more],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )


def outcomes(cases: Sequence[Case]) -> Iterator[tuple[Kind, End]]:
    kinds = [case[:3] for case in cases]
    for first in range(0, len(kinds), AT_ONCE):
        some = {kind: start(*kind) for kind in kinds[first : first + AT_ONCE]}
        for kind, process in some.items():
            with process:
                _, said = process.communicate(timeout=100)
            yield kind, (process.returncode, said)


def check(case: Case, end: End) -> None:
    status, said = end
    assert status != 0
    assert re.search(case[3], "\n".join(said.splitlines()[:10]), re.S), said
    assert len(re.findall(r"\bworker \d of 2\b", said, re.M)) == 1, said


def name(case: Case) -> str:
    return "-".join(filter(None, case[:3]))


@pytest.fixture(scope="module")
def crashed() -> dict[Kind, End]:
    return dict(outcomes(CASES))


@pytest.mark.parametrize("case", CASES, ids=name)
def test_the_cause_comes_first(case: Case, crashed: dict[Kind, End]) -> None:
    check(case, crashed[case[:3]])
