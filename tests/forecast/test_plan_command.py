"""`unisono plan` as a user calls it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from click.testing import CliRunner
from tests.forecast.test_measured_steps import TRAINING

from unisono.cli import main
from unisono.world import num_devices

COMMAND = [sys.executable, "-m", "unisono.cli", "plan"]
DEVICE = ["--samples", "1.28e6", "--batch", "128", "--step", "7.2s"]


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (
            (),
            "SCRIPT must be a Python file, but none is named: use for example `unisono plan train",
        ),
        (("missing.py",), "does not exist"),
        (("--workers", "0,1", "train.py"), "`--workers` must be numbers of workers from 1 to"),
        (("--workers", "1,…,8", "train.py"), "`--workers` must be numbers of workers"),
        (("--hosts", "0", "train.py"), "`--hosts` must be a whole number of at least 1"),
        (("--hosts", "2", "--workers-per-host", "2", "train.py"), "`--hosts` or `--workers-per-"),
        (("--bandwidth", "10", "train.py"), "`--bandwidth` must be bits or bytes a second"),
        (("--bandwidth", "1Gbit/s", "train.py"), "`--bandwidth` must be that of links between"),
        (("--latency", "1us", *DEVICE), "add for example `--workers-per-host 8` and `--gradients"),
        (("--mtbf", "5", "train.py"), "`--mtbf` must be a time above 0 with its unit"),
        (("--recovery", "5s", "train.py"), "`--recovery` must go with `--mtbf`"),
        (("--mtbf", "5h", *DEVICE), "`--recovery` must say what a failure costs"),
        (("--seconds", "0", "train.py"), "`--seconds` must be a number of seconds above 0"),
        (("--spread", "100%", *DEVICE), "`--spread` must be a share below 1"),
        (("--step", "7.2s", "train.py"), "`--step` must be left out where a SCRIPT is timed"),
        (("--samples", "100", "--batch", "8"), "`--step` is missing"),
        (("--spread", "1%"), "`--samples` is missing"),
        (("-o", "no folder/page.html", *DEVICE), "`-o` must name a file in a folder that takes"),
        (("-o", "train.py", *DEVICE), "`-o` must name a new file, or one that this command wrote"),
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


def plan(folder: Path, *args: str) -> subprocess.CompletedProcess[str]:
    environ = {**os.environ, "COLUMNS": "100", "PYTHONIOENCODING": "utf-8"}
    return subprocess.run(
        [*COMMAND, *args], cwd=folder, env=environ, capture_output=True, text=True, timeout=100
    )


@pytest.mark.slow
def test_the_classic_sum_and_then_what_really_happens(tmp_path: Path) -> None:
    done = plan(tmp_path, *DEVICE, "--epochs", "100", "--workers", "1,32", "-o", "a page.html")
    assert done.returncode == 0, done.stderr
    one, many = (line.split() for line in done.stdout.splitlines()[1:3])
    assert one[:6] == ["1", "128", "7.2", "s", "2,000", "h"]
    assert many[:6] == ["32", "4,096", "7.2", "s", "62.5", "h"]
    assert os.listdir(tmp_path) == ["a page.html"]
    done = plan(
        tmp_path, *DEVICE, "--epochs", "100", "--workers", "1,32", "--json", "--spread", "5%",
        "--gradients", "102MB", "--bandwidth", "1Gbit/s", "--mtbf", "1000h", "--recovery", "5min",
    )  # fmt: skip
    answer = json.loads(done.stdout)
    one, many = answer["rows"]
    assert one["total_s"] == pytest.approx(2000 * 3600, rel=1e-3)
    assert 62.5 * 3600 < many["total_s"] < 80 * 3600
    assert answer["epoch_s_alone"] * 100 / 32 == pytest.approx(62.5 * 3600)
    assert many["causes_s"]["bandwidth"] > 0.02
    assert many["hosts"] == 32


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_a_program_in_a_folder_with_spaces_is_forecast(tmp_path: Path) -> None:
    folder = tmp_path / "a folder"
    folder.mkdir()
    (folder / "train it.py").write_text(TRAINING.replace("SLEEP_S", "0.005"))
    options = ["--json", "--seconds", "0.2", "--workers", "1,2", "--workers-per-host", "1"]
    done = plan(folder, *options, "--threads", str(num_devices()), "train it.py", "100000")
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert os.listdir(folder) == ["train it.py"]
    assert answer["program"] == "train it.py"
    one, two = answer["rows"]
    assert two["hosts"] == 2
    assert two["causes_s"]["copying"] > 0, "no core is left for it"
    assert any("sent, received and added up" in sentence for sentence in answer["assumptions"])
    assert one["step_s"] == pytest.approx(answer["measured"][0]["step_s"])
    assert one["step_s"] > 0.02, "it sleeps in each of four shards"
    assert one["is_same_run"]
    assert (
        done.stderr
        == "unisono: timing steps on 1 worker\nunisono: timing steps on 1 worker, again\n"
    )


@pytest.mark.long
def test_ctrl_c_ends_everything(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("import time\ntime.sleep(1000)\n")
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    running = subprocess.Popen(
        [*COMMAND, "train.py"],
        cwd=tmp_path,
        env={**os.environ, "TMPDIR": str(temporary)},
        stderr=subprocess.PIPE,
        text=True,
    )
    while not list(temporary.glob("*/on-1-0/rank0.log")):
        time.sleep(0.05)
        assert running.poll() is None
    running.send_signal(signal.SIGINT)
    running.communicate(timeout=60)
    assert running.returncode == 130
    assert list(temporary.glob("unisono-*")) == []
