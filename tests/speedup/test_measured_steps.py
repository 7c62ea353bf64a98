"""Programs are timed in real workers, and leave nothing behind."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from unisono.tools.plan.efficiency import Measured, measure_steps
from unisono.tools.verify.recorder import Limits
from unisono.tools.verify.trials import Program

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]

TRAINING = """
import sys, time, torch, unisono

def main(steps):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1))
    data = torch.utils.data.TensorDataset(torch.randn(96, 4), torch.randn(96, 1))

    def loss(model, batch):
        time.sleep(0.002)
        return torch.nn.functional.mse_loss(model(batch[0]), batch[1])

    optimizer = torch.optim.Adam(model.parameters())
    trainer = unisono.Trainer(model, optimizer, loss, shards=4, directory="runs/mine")
    trainer.fit(data, batch_size=8, steps=steps)

if __name__ == "__main__":
    main(int(sys.argv[1]))
"""


def measure(folder: Path, source: str, *args: str, most: int = 1, **limits: float) -> Measured:
    (folder / "train it.py").write_text(source)
    program = Program("script", "train it.py", args, folder)
    given = Limits(**{"timing_s": 0.2, "timeout_s": 60.0, **limits})
    said: list[str] = []
    return measure_steps(program, [1, most] if most > 1 else [1], given, os.environ, said.append)


def test_steps_are_timed_on_one_worker_and_on_two_and_nothing_is_left(tmp_path: Path) -> None:
    found = measure(tmp_path, TRAINING, "100000", most=2)
    assert os.listdir(tmp_path) == ["train it.py"]
    assert (found.device, found.num_shards, found.batch_size, found.num_samples) == (
        "cpu",
        4,
        8,
        96,
    )
    assert found.gradient_bytes == (4 * 64 + 64 + 64 + 1) * 4
    assert found.state_bytes == 2 * found.gradient_bytes + 4 * 4  # Adam's two, and its four counts
    for steps, number in zip(found.steps, (1, 2), strict=True):
        assert steps.num_workers == number
        assert len(steps.turns_s) == 2
        assert steps.slowest_s >= steps.own_s >= 0.002 * 4 / number
        assert steps.step_s > steps.slowest_s


@pytest.mark.parametrize(
    ("source", "args", "words"),
    [
        (TRAINING, ("1",), "SCRIPT must train for at least 15 steps or so"),
        (TRAINING, ("0",), "SCRIPT must train with `unisono.Trainer` or `unisono.Run`"),
        (
            "import torch\nw = torch.nn.Parameter(torch.ones(1))\n"
            "o = torch.optim.SGD([w], 0.1)\nwhile True: w.sum().backward(); o.step()\n",
            (),
            "SCRIPT must train with `unisono.Trainer` or `unisono.Run`",
        ),
        ("raise RuntimeError('no such data')\n", (), "RuntimeError: no such data"),
    ],
    ids=["one-step", "no-steps", "plain-torch", "fails"],
)
def test_what_cannot_be_timed_is_refused(
    source: str, args: tuple[str, ...], words: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match="SCRIPT must") as raised:
        measure(tmp_path, source, *args)
    assert words in str(raised.value)
