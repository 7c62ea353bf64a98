"""The command as a user calls it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
from click.testing import CliRunner
from tests.verify.mistakes import MISTAKES, PROGRAMS

from unisono.tools.cli import main
from unisono.tools.verify.findings import Verdict
from unisono.tools.verify.recorder import Limits
from unisono.tools.verify.trials import Program
from unisono.tools.verify.verifier import verify as verify_program

pytestmark = [pytest.mark.timeout(240)]
COMMAND = [sys.executable, "-m", "unisono", "verify"]

AROUND = """
import os, sys
from pathlib import Path
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("gloo")
torch.manual_seed(0)
data = TensorDataset(torch.randn(64, 4), torch.randn(64, 1))
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), 0.1)
sampler = DistributedSampler(data)
loader = DataLoader(data, 4, sampler=sampler)
"""
LOOP = """
for epoch in range(2):
    sampler.set_epoch(epoch)
    for number, (x, y) in enumerate(loader):
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
"""


def verify(folder: Path, *args: str, **more: str) -> subprocess.CompletedProcess[str]:
    environ = {**os.environ, **more}
    return subprocess.run(
        [*COMMAND, *args], cwd=folder, env=environ, capture_output=True, text=True
    )


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ((), "SCRIPT must be a Python file, but none is named"),
        (("missing.py",), "does not exist"),
        (("-n", "1", "train.py"), "`-n` must be at least 2"),
        (("--steps", "0", "train.py"), "`--steps` must be a whole number of at least 1"),
        (("--timeout", "-1", "train.py"), "`--timeout` must be a number of seconds above 0"),
        (
            ("--timeout", "1e300", "train.py"),
            "at most 1,000,000,000, but is '1e300': use for example",
        ),
    ],
)
def test_a_wrong_command_line_is_refused_in_a_sentence(
    args: tuple[str, ...], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "train.py").touch()
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(main, ["verify", *args])
    assert done.exit_code == 2
    assert words in done.stderr


@pytest.mark.slow
def test_json_is_all_that_is_printed_and_the_status_is_1(tmp_path: Path) -> None:
    (mistake,) = (m for m in MISTAKES if str(m) == "learning-rate-scaled-ddp")
    folder = tmp_path / "a folder"
    folder.mkdir()
    (folder / "train it.py").write_text(mistake.source())
    done = verify(folder, "--json", "train it.py")
    answer = json.loads(done.stdout)
    assert done.returncode == 1, done.stderr
    assert answer.keys() == {"program", "world_sizes", "findings"}
    assert answer["program"] == "train it.py"
    assert answer["world_sizes"] == [1, 2]
    assert len(answer["findings"]) == 19
    first = answer["findings"][0]
    assert first.keys() == {"check", "verdict", "evidence", "remedy"}
    assert first["check"] == "learning-rate-scaled"
    assert "2 times the learning rate" in first["evidence"]
    # Nothing of the program's is left, neither its checkpoint nor its prints.
    assert os.listdir(folder) == ["train it.py"]


@pytest.mark.long
def test_a_module_by_its_name_a_table_status_0_and_arguments_for_it(tmp_path: Path) -> None:
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__init__.py").touch()
    program = (PROGRAMS / "averaged_by_hand.py").read_text()
    (tmp_path / "package" / "train.py").write_text(program)
    called = ("-m", "package.train", "--lr", "0.02", "--epochs", "2")
    done = verify(tmp_path, *called, PYTHONIOENCODING="utf-8")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("✓") == 19
    assert "training on 1 and 2 ranks gives the same result" in done.stdout


@pytest.mark.long
def test_a_program_that_fails_is_shown_with_its_traceback(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(AROUND + 'raise RuntimeError("no such data")\n')
    done = verify(tmp_path, "train.py")
    assert done.returncode == 2
    assert "RuntimeError: no such data" in done.stderr
    assert f'File "{tmp_path}/train.py"' in done.stderr
    assert "did not come to a step" in done.stdout.replace("\n", " ")


@pytest.mark.long
def test_what_a_program_did_before_it_failed_is_judged_and_not_called_equal(tmp_path: Path) -> None:
    failing = LOOP + '        if number == 3: raise RuntimeError("later")\n'
    (tmp_path / "train.py").write_text(AROUND + failing)
    done = verify(tmp_path, "--json", "train.py")
    verdicts = {f["check"]: f["verdict"] for f in json.loads(done.stdout)["findings"]}
    assert done.returncode == 2
    assert verdicts["gradient-times-n"] == "ok"
    assert "RuntimeError: later" in done.stderr


def verdict_on(folder: Path, source: str, *args: str) -> Verdict:
    """Verify a program without the command, which would load torch in a process more."""
    (folder / "train.py").write_text(source)
    program = Program("script", "train.py", args, folder)
    return verify_program(program, 2, Limits(), os.environ, lambda line: None)


@pytest.mark.slow
def test_what_could_not_be_recorded_is_not_called_equal(tmp_path: Path) -> None:
    number = "class Number(float):\n    __float__ = None\n"  # torch computes with it all the same
    odd = 'optimizer.param_groups[0]["lr"] = Number(0.1)\n'
    found = verdict_on(tmp_path, AROUND + number + odd + LOOP)
    assert found.status == 2
    assert "not all that it did could be recorded" in found.trouble
    assert "TypeError: 'NoneType' object is not callable" in found.trouble


@pytest.mark.slow
def test_a_program_without_an_optimizer_is_not_verified(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    found = verdict_on(tmp_path, "import sys\nprint(sys.argv)\nsys.exit(0)\n", "-x")
    assert (found.status, found.trouble) == (2, "")
    assert "argv" not in "".join(capfd.readouterr())


@pytest.mark.long
def test_a_program_that_hangs_is_ended_and_named(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(AROUND + "import time\ntime.sleep(1000)\n" + LOOP)
    done = verify(tmp_path, "--timeout", "15", "train.py")
    assert done.returncode == 2
    assert "took longer than 15 s" in done.stderr


@pytest.mark.long
def test_files_in_the_working_folder_are_found_and_left_alone(tmp_path: Path) -> None:
    resuming = """
if os.path.exists("last.pt"):
    model.load_state_dict(torch.load("last.pt"))
dist.barrier()
if dist.get_rank() == 0:
    torch.save(model.state_dict(), "last.pt")
    Path("new.txt").write_text("new")
assert Path("data/here.txt").read_text() == "data"
"""
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "here.txt").write_text("data")
    (tmp_path / "train.py").write_text(AROUND + LOOP + resuming)
    for _ in range(2):
        done = verify(tmp_path, "train.py")
        assert done.returncode == 0, done.stdout + done.stderr
    assert sorted(os.listdir(tmp_path)) == ["data", "train.py"]


@pytest.mark.long
def test_ctrl_c_ends_everything(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(AROUND + "import time\ntime.sleep(1000)\n")
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    environ = {**os.environ, "TMPDIR": str(temporary)}
    running = subprocess.Popen(
        [*COMMAND, "train.py"], cwd=tmp_path, env=environ, stderr=subprocess.PIPE, text=True
    )
    while not list(temporary.glob("*/several/rank1.log")):
        time.sleep(0.05)
        assert running.poll() is None
    running.send_signal(signal.SIGINT)
    running.communicate(timeout=60)
    assert running.returncode == 130
    assert list(temporary.glob("unisono-*")) == []


@pytest.mark.parametrize("command", ["verify", "plan"])
def test_a_temporary_folder_that_takes_nothing_is_named(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "train.py").touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "missing"))
    done = CliRunner().invoke(main, [command, "train.py"])
    assert done.exit_code == 2
    assert "set TMPDIR" in done.stderr
