"""Programs are timed in real workers, and leave nothing behind."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from unisono.forecast.measured_steps import Measurement, measure_recovery, measure_steps
from unisono.verify.trials import Program

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]

TRAINING = """
import sys, time, torch, unisono

def main(steps):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1))
    data = torch.utils.data.TensorDataset(torch.randn(96, 4), torch.randn(96, 1))

    def loss(model, batch):
        time.sleep(SLEEP_S)
        return torch.nn.functional.mse_loss(model(batch[0]), batch[1])

    optimizer = torch.optim.Adam(model.parameters())
    trainer = unisono.Trainer(model, optimizer, loss, shards=4, directory="runs/mine")
    trainer.fit(data, batch_size=8, steps=steps)

if __name__ == "__main__":
    main(int(sys.argv[1]))
"""


def measurement(folder: Path, source: str, *args: str, sleep_s: float = 0.002) -> Measurement:
    (folder / "train it.py").write_text(source.replace("SLEEP_S", str(sleep_s)))
    program = Program("script", "train it.py", args, folder)
    said: list[str] = []
    return Measurement(program, 0.2, 60.0, 1, dict(os.environ), said.append)


def test_steps_are_timed_on_one_worker_and_on_two_and_nothing_is_left(tmp_path: Path) -> None:
    found = measure_steps(measurement(tmp_path, TRAINING, "100000"), 2)
    profile = found.profile
    assert os.listdir(tmp_path) == ["train it.py"]
    assert (profile.num_shards, profile.batch_size, profile.num_samples) == (4, 8, 96)
    assert profile.gradient_bytes == (4 * 64 * 4, 64 * 4, 64 * 4, 4)
    # A backward pass begins with the last layer.
    assert 0 < profile.ready[2] <= profile.ready[0] <= 1
    assert profile.together is not None
    assert (profile.alone.shards, profile.together.shards) == ((4,), (2, 2))
    for steps in (profile.alone, profile.together):
        assert set(steps.turns) == {0, 1}
        assert steps.shard_s.min() >= 0.002
        assert steps.step_s.mean() >= 0.002 * steps.shards[0]
    assert found.startup_s > 0
    assert 0 < profile.backward_share < 1


@pytest.mark.parametrize(
    ("source", "args", "words"),
    [
        (TRAINING, ("1",), "SCRIPT must train for at least 15 steps or so"),
        (TRAINING, ("0",), "SCRIPT must train with `unisono.Trainer` or `unisono.Run`"),
        ("import unisono, sys\nsys.exit(0)\n", (), "SCRIPT must train with `unisono.Trainer`"),
        (
            "import torch\nw = torch.nn.Parameter(torch.ones(1))\n"
            "o = torch.optim.SGD([w], 0.1)\nwhile True: w.sum().backward(); o.step()\n",
            (),
            "SCRIPT must train with `unisono.Trainer` or `unisono.Run`",
        ),
        ("raise RuntimeError('no such data')\n", (), "RuntimeError: no such data"),
    ],
    ids=["one-step", "no-steps", "no-training", "plain-torch", "fails"],
)
def test_what_cannot_be_timed_is_refused(
    source: str, args: tuple[str, ...], words: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match="SCRIPT must") as raised:
        measure_steps(measurement(tmp_path, source, *args), 1)
    assert words in str(raised.value)


def test_a_program_that_takes_too_long_is_ended(tmp_path: Path) -> None:
    asked = replace(measurement(tmp_path, "import time\ntime.sleep(1000)\n"), timeout_s=1.0)
    with pytest.raises(ValueError, match="it took longer than 1 s"):
        measure_steps(asked, 1)


def test_a_killed_worker_costs_the_time_until_its_replacement_computes(tmp_path: Path) -> None:
    asked = measurement(tmp_path, TRAINING, "100000", sleep_s=0.02)
    assert 0 < measure_recovery(asked, 2, 0.04) < 60
