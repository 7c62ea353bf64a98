"""`unisono plan` as a user calls it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner
from tests.speedup.test_efficiency import measured, told
from tests.speedup.test_measured_steps import TRAINING

from unisono.tools.cli import main
from unisono.tools.plan.efficiency import PlanAnswer, on_hosts

COMMAND = [sys.executable, "-m", "unisono", "plan"]


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("--workers", "0,1", "train.py"), "`--workers` must be numbers of workers of at least 1"),
        (("--workers", "1,…,8", "train.py"), "`--workers` must be numbers of workers"),
        (("--workers", "100000", "train.py"), "there must be at most 1,024 workers"),
        (("--hosts", "0", "train.py"), "`--hosts` must be a whole number of at least 1"),
        (("--bandwidth", "10", "train.py"), "`--bandwidth` must be kbit/s, Mbit/s, Gbit/s"),
        (("--bandwidth", "0Gbit/s", "train.py"), "`--bandwidth` must be kbit/s"),
        (("--bandwidth", "1Gbit/s", "train.py"), "`--bandwidth` must be that of links between"),
        (("--seconds", "0", "train.py"), "`--seconds` must be a number of seconds above 0"),
    ],
)
def test_a_wrong_command_line_is_refused_in_a_sentence(
    args: tuple[str, ...], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "train.py").write_text("print(1)")
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(main, ["plan", *args])
    assert done.exit_code == 2
    assert done.stderr.startswith("unisono: ")
    assert words in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_a_program_in_a_folder_with_spaces_is_timed(tmp_path: Path) -> None:
    folder = tmp_path / "a folder"
    folder.mkdir()
    (folder / "train it.py").write_text(TRAINING)
    options = ["--seconds", "0.2", "--workers", "1,8", "--hosts", "2", "--bandwidth", "1Gbit/s"]
    done = subprocess.run(
        [*COMMAND, *options, "train it.py", "100000"],
        cwd=folder,
        env={**os.environ, "COLUMNS": "100", "PYTHONIOENCODING": "utf-8"},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    assert os.listdir(folder) == ["train it.py"]
    head, row, _, limit, timed, ends, _, *formula = done.stdout.splitlines()
    assert head.split()[:4] == ["workers", "ms", "a", "step"]
    assert row.split()[0] == "1"
    assert row.split()[-3:] == ["1.00", "100", "%"]
    assert limit == "Limit: not known, as one worker alone was timed."
    assert timed.startswith("Timed on cpu: a batch of 8 in 4 shards;")
    assert ends == "It ends at 1: more workers need more `shards`, which give other results."
    assert [line.split()[0] for line in formula[:5]] == [
        "2",
        "passes",
        "links",
        "update",
        "together",
    ]
    assert "(1 + 1) · 1/2 · 1.5 KiB of gradients at 94 % of 1 Gbit/s" in formula[2]
    assert (
        done.stderr
        == "unisono: timing steps on 1 worker\nunisono: timing steps on 1 worker, again\n"
    )


def test_the_answer_is_plain_json() -> None:
    timed = measured(told(0.04), told(0.02, 0.02))
    answer = PlanAnswer("train.py", timed, 4, on_hosts(timed, 2, 1.25e9))
    found = json.loads(json.dumps(answer.as_json, allow_nan=False))
    assert [row["num_workers"] for row in found["rows"]] == [1, 2]
    assert found["rows"][1]["speed_up"] == pytest.approx(2.0)
    assert found["limit"].startswith("Limit: ")
    assert len(found["notes"]) == 2
    assert found["on_hosts"]["hosts"] == 2
    assert (found["program"], found["num_shards"]) == ("train.py", 4)
