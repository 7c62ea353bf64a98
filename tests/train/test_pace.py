"""Workers that are slower than one would be: told once, with the times that show it."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest
from tests.warm.processes import run

from unisono.training.pace import Pace

Row = tuple[float, ...]


class Team:
    """Two workers whose steps take a while, of which passes and updates are a part."""

    def __init__(
        self, step_s: float, passes_s: float, update_s: float = 0.0, between_s: float = 0.0
    ) -> None:
        self.world = SimpleNamespace(rank=0)
        self.membership = SimpleNamespace(ranks=(0, 1))
        self._step_s, self._passes_s, self._update_s = step_s, passes_s, update_s
        self._between_s = between_s

    def times(self, rank: int, step: int) -> Row | None:
        half_s = self._passes_s / 2
        waits_s = self._step_s - self._passes_s - self._update_s - self._between_s
        return (step * self._step_s, 0.0, half_s, half_s, waits_s, 0.0, self._update_s)


def lines(team: Any, *, begun_at: int = 0, num_steps: int = 200) -> list[tuple[int, str]]:
    pace = Pace(team, begun_at)
    said = ((step, pace.record_step(step)) for step in range(begun_at, begun_at + num_steps))
    return [(step, line) for step, line in said if line is not None]


@pytest.mark.parametrize("begun_at", [0, 1000])
def test_a_step_that_mostly_waits_is_told_once(begun_at: int) -> None:
    ((step, line),) = lines(Team(0.001, 0.0002, 0.0001), begun_at=begun_at)
    assert step == begun_at + 63
    assert line.startswith(
        "2 workers are slower than one would be: a step takes 1 ms, but all workers' passes and "
        "updates, with what lies between, 600 µs; "
    )


@pytest.mark.parametrize(
    "team",
    [
        Team(0.010, 0.0095),
        Team(0.010, 0.006),
        Team(0.010, 0.003, 0.002),
        Team(0.010, 0.001, 0.0, 0.008),
    ],
    ids=["gains much", "gains", "gains a little", "long callbacks"],
)
def test_nothing_is_told_where_workers_gain(team: Team) -> None:
    assert lines(team) == []


def test_nothing_is_told_of_few_steps_or_without_times() -> None:
    silent = Team(0.001, 0.0001)
    silent.times = lambda rank, step: None  # type: ignore[method-assign]
    assert lines(silent) == []
    assert lines(Team(0.001, 0.0001), num_steps=63) == []


PROGRAM = """
import torch
import unisono

torch.manual_seed(0)
model = torch.nn.Linear(4, 1)
data = torch.utils.data.TensorDataset(torch.randn(64, 4), torch.randn(64, 1))
loss = lambda model, batch: torch.nn.functional.mse_loss(model(batch[0]), batch[1])
trainer = unisono.Trainer(model, torch.optim.SGD(model.parameters(), lr=0.01), loss, shards=2)
trainer.fit(data, batch_size=8, steps=100)
"""


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 2])
def test_a_linear_layer_is_told_of_on_two_workers_alone(workers: int, tmp_path: Any) -> None:
    (tmp_path / "train.py").write_text(PROGRAM)
    command = [sys.executable, "-m", "unisono", "run", "-n", str(workers), "train.py"]
    done: subprocess.CompletedProcess[str] = run(command, cwd=tmp_path, check=True)
    assert done.stdout.count("are slower than one would be") == (workers == 2), done.stdout
