"""Runs that our launcher has not started leave their failure in their directory, too."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.warm import processes

from unisono.launch.failure_files import (
    JSON_NAME,
    TEXT_NAME,
    add_failure,
    put_together,
    remove_older,
)

PROGRAM = str(Path(__file__).parent / "failing.py")
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
PLACE = "This was in step 2, in the forward pass of shard 1, over samples 9, 11."


def facts(rank: int, time_s: float, waited_for: int | None = None) -> dict[str, Any]:
    return {
        "time_unix_s": time_s,
        "rank": rank,
        "error": f"E{rank}",
        "waited_for": waited_for,
        "message": f"worker {rank}",
        "others": [],
    }


@pytest.mark.parametrize(
    ("before", "mine", "first", "others"),
    [
        (None, facts(1, 20.0), 1, []),
        (facts(0, 5.0), facts(1, 20.0), 1, []),  # of an earlier job
        (facts(0, 15.0), facts(1, 20.0), 0, [1]),
        (facts(0, 15.0, waited_for=1), facts(1, 20.0), 1, [0]),  # a consequence came first
        (facts(0, 15.0, waited_for=2), facts(1, 20.0, waited_for=2), 0, [1]),
    ],
)
def test_the_first_failure_of_a_job_is_the_cause(
    before: dict[str, Any] | None, mine: dict[str, Any], first: int, others: list[int]
) -> None:
    both = put_together(before, mine, 10.0)
    assert (both["rank"], [one["rank"] for one in both["others"]]) == (first, others)


def test_several_processes_write_one_file(tmp_path: Path) -> None:
    told: list[str] = []
    for one in (facts(0, 15.0, waited_for=1), facts(1, 16.0), facts(2, 17.0, waited_for=1)):
        add_failure([tmp_path], one, 10.0, told.append)
    assert (tmp_path / TEXT_NAME).read_text() == "worker 1\n"
    both = json.loads((tmp_path / JSON_NAME).read_text())
    assert (both["rank"], [one["rank"] for one in both["others"]]) == (1, [0, 2])
    remove_older([tmp_path], 10.0)
    assert len(os.listdir(tmp_path)) == 2
    remove_older([tmp_path, tmp_path / "nowhere"], 20.0)
    assert (os.listdir(tmp_path), told) == ([], [])


def test_what_is_no_failure_is_replaced_and_what_cannot_be_written_is_said(tmp_path: Path) -> None:
    told: list[str] = []
    for number, text in enumerate(("", "[]", "nonsense", '{"time_unix_s": "now"}')):
        folder = tmp_path / str(number)
        folder.mkdir()
        (folder / JSON_NAME).write_text(text)
        add_failure([folder], facts(1, 20.0), 10.0, told.append)
        assert json.loads((folder / JSON_NAME).read_text())["rank"] == 1
    assert told == []
    link = tmp_path / "link"
    link.mkdir()
    (link / JSON_NAME).symlink_to("/etc/passwd")
    add_failure([link, tmp_path / "nowhere"], facts(1, 20.0), 10.0, told.append)
    assert [line.startswith("the failure cannot be written to ") for line in told] == [True, True]


def run(command: list[str], environ: dict[str, str] | None = None) -> subprocess.Popen[str]:
    variables = {**os.environ, "OMP_NUM_THREADS": "1", **(environ or {})}
    return processes.start(command, text=True, stderr=subprocess.PIPE, env=variables)


def as_under_mpirun(folder: Path, way: str, name: str) -> list[int]:
    started = [
        run(
            [sys.executable, PROGRAM, str(folder), way],
            {
                "OMPI_COMM_WORLD_RANK": str(rank),
                "OMPI_COMM_WORLD_SIZE": "2",
                "OMPI_COMM_WORLD_LOCAL_RANK": str(rank),
                "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
                "PMIX_NAMESPACE": f"prterun-{os.getpid()}-{name}@1",
            },
        )
        for rank in range(2)
    ]
    for process in started:
        process.communicate(timeout=100)
    return [process.returncode for process in started]


def told_in(folder: Path) -> tuple[dict[str, Any], str]:
    return json.loads((folder / JSON_NAME).read_text()), (folder / TEXT_NAME).read_text()


@pytest.mark.slow
def test_alone_a_failure_is_written_and_removed_by_a_run_that_ends_well(tmp_path: Path) -> None:
    folder = tmp_path / "my run"
    for way, status, is_left in (
        ("raise", 1, True),
        ("interrupt", 130, True),  # nothing changes
        ("well", 0, False),
        ("after", 1, True),
    ):
        process = run([sys.executable, PROGRAM, str(folder), way])
        _, printed = process.communicate(timeout=100)
        assert process.returncode in (status, -2), printed
        assert ({TEXT_NAME, JSON_NAME} <= set(os.listdir(folder))) == is_left, way
        if way == "raise":
            found, text = told_in(folder)
            expected = (0, 2, 1, "KeyError: 'bad sample'", 1)
            names = ("rank", "step", "world_size", "error", "exit_code")
            assert tuple(found[name] for name in names) == expected
            assert PLACE in text
            assert text.startswith("worker 0 of 1 raised an exception:\n")
            assert "KeyError: 'bad sample'" in printed  # Python prints it as ever


@pytest.mark.slow
def test_under_torchrun_the_first_failure_is_written(tmp_path: Path) -> None:
    process = run([*TORCHRUN, PROGRAM, str(tmp_path), "raise"])
    _, printed = process.communicate(timeout=100)
    assert process.returncode == 1, printed
    found, text = told_in(tmp_path)
    assert (found["rank"], found["step"], found["world_size"]) == (1, 2, 2)
    assert found["error"] == "KeyError: 'bad sample'"
    assert text.startswith("worker 1 of 2 raised an exception:\n")
    assert PLACE in text


@pytest.mark.slow
def test_under_mpirun_too_with_what_followed(tmp_path: Path) -> None:
    assert as_under_mpirun(tmp_path, "raise", "a") == [1, 1]
    found, _ = told_in(tmp_path)
    assert (found["rank"], found["waited_for"]) == (1, None)
    assert [(one["rank"], one["waited_for"]) for one in found["others"]] == [(0, 1)]
    assert as_under_mpirun(tmp_path, "nan", "b") == [1, 1]
    found, text = told_in(tmp_path)
    assert len(found["others"]) == 1
    assert found["others"][0]["error"] == found["error"]
    assert "the output of every module is finite, so the loss function makes it" in text


@pytest.mark.slow
def test_a_worker_that_is_killed_is_named_by_another(tmp_path: Path) -> None:
    assert as_under_mpirun(tmp_path, "kill", "c") == [1, -9]
    found, text = told_in(tmp_path)
    assert (found["rank"], found["waited_for"]) == (0, 1)
    assert "PeerLostError" in text
