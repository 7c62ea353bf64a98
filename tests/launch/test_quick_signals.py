"""Signals that come in pairs, and a terminal that is closed: the newest step is on the disk."""

import os
import pty
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from torch.utils.data import TensorDataset

import unisono
from unisono.runtime.checkpoint.run_directory import RunDirectory

pytestmark = pytest.mark.slow

STEPS, BEGUN = 400, 10


def train(directory):
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 1)

    def loss(model, batch):
        time.sleep(0.02)
        return model(batch[0]).square().mean()

    trainer = unisono.Trainer(
        *(model, torch.optim.Adam(model.parameters()), loss),
        shards=2,
        directory=directory,
        checkpoint="10min",
    )
    trainer.fit(TensorDataset(torch.randn(40, 3)), batch_size=8, steps=STEPS)


def command(folder: Path, launched: bool) -> list[str]:
    start = ["-m", "unisono", "run", "-n", "2", "--threads", "1"] if launched else []
    return [sys.executable, *start, __file__, str(folder / "run")]


def await_steps(folder: Path) -> None:
    events, until_s = folder / "run" / "events.jsonl", time.monotonic() + 60
    while not events.exists() or events.read_text().count('"event":"step"') < BEGUN:
        assert time.monotonic() < until_s
        time.sleep(0.05)


def last_step(folder: Path) -> int:
    return max((one.step for one in RunDirectory(folder / "run", 3).entries()), default=0)


@pytest.mark.promise("nothing-lost.10")
@pytest.mark.parametrize("launched", [True, False], ids=["unisono run", "python"])
@pytest.mark.parametrize("signums", [("TERM", "TERM"), ("USR1", "TERM"), ("INT", "INT"), ("HUP",)])
def test_two_signals_within_two_seconds_are_one(tmp_path, signums, launched):
    numbers = [signal.Signals[f"SIG{name}"] for name in signums]
    silent = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE}
    with subprocess.Popen(command(tmp_path, launched), text=True, **silent) as process:
        await_steps(tmp_path)
        for number, signum in enumerate(numbers):
            time.sleep(0.1 * bool(number))
            process.send_signal(signum)
        _, errors = process.communicate(timeout=60)
    # A second one may find Python on its way out.
    assert process.returncode in (128 + numbers[0], -signal.SIGINT, -numbers[-1]), errors
    assert BEGUN <= last_step(tmp_path) < STEPS, errors


@pytest.mark.promise("nothing-lost.10")
def test_a_terminal_that_is_closed_lets_the_step_finish(tmp_path):
    pid, terminal = pty.fork()
    if not pid:
        os.execv(sys.executable, command(tmp_path, launched=True))

    def read() -> None:
        try:
            while os.read(terminal, 1 << 12):
                pass
        except OSError:  # it is closed
            pass

    threading.Thread(target=read, daemon=True).start()
    await_steps(tmp_path)
    os.close(terminal)
    _, status = os.waitpid(pid, 0)
    assert os.waitstatus_to_exitcode(status) == 128 + signal.SIGHUP
    assert BEGUN <= last_step(tmp_path) < STEPS


def test_nohup_goes_on(tmp_path):
    ignores = "import os, signal, sys; signal.signal(signal.SIGHUP, signal.SIG_IGN); "
    start = [
        sys.executable,
        "-c",
        ignores + "os.execv(sys.executable, [sys.executable, *sys.argv[1:]])",
    ]
    silent = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, "start_new_session": True}
    with subprocess.Popen([*start, *command(tmp_path, launched=True)[1:]], **silent) as process:
        await_steps(tmp_path)
        os.killpg(process.pid, signal.SIGHUP)  # the workers, too
        _, errors = process.communicate(timeout=60)
    assert process.returncode == 0, errors
    assert last_step(tmp_path) == STEPS


if __name__ == "__main__":
    train(sys.argv[1])
