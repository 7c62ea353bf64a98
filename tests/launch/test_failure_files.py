"""What a job that failed leaves in its run directory."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import unisono
from unisono.runtime.launch import policy
from unisono.runtime.launch.exceptions import FAILURE_FILE, note_end
from unisono.runtime.launch.report import failure_message


def failed(*failures: policy.WorkerFailure) -> policy.JobState:
    state = policy.start(3)
    for failure in failures:
        state = policy.failed(state, failure, 0.0).state
    return state


KILLED = policy.WorkerFailure(2, -9)


def test_the_file_is_written_and_removed(tmp_path: Path) -> None:
    told: list[str] = []
    places = [tmp_path, tmp_path / "not there"]
    note_end(places[:1], failed(KILLED), 3, told.append)
    assert (tmp_path / FAILURE_FILE).read_text() == f"{failure_message(failed(KILLED), 3)}\n"
    note_end(places, policy.start(3), 3, told.append)
    assert (os.listdir(tmp_path), told) == ([], [])


@pytest.mark.parametrize(
    "spoil", [lambda path: path.symlink_to("/etc/passwd"), lambda path: path.mkdir()]
)
def test_what_cannot_be_written_is_said(tmp_path: Path, spoil: Callable[[Path], None]) -> None:
    told: list[str] = []
    spoil(tmp_path / FAILURE_FILE)
    note_end([tmp_path, tmp_path / "not there"], failed(KILLED), 3, told.append)
    assert [line.startswith("the failure cannot be written to ") for line in told] == [True, True]


def train(directory: str, fails_at: int) -> None:
    torch.manual_seed(0)
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def loss(model: nn.Module, batch: list[torch.Tensor]) -> torch.Tensor:
        if fails_at in batch[1]:
            raise KeyError("bad sample")
        return model(batch[0]).sum()

    trainer = unisono.Trainer(model, optimizer, loss, shards=2, seed=0, directory=directory)
    data = TensorDataset(torch.ones(12, 2), torch.arange(12))
    trainer.fit(data, batch_size=4, epochs=1, shuffle=False)


@pytest.mark.slow
def test_a_run_that_fails_leaves_it_and_one_that_ends_well_removes_it(tmp_path: Path) -> None:
    with pytest.raises(KeyError, match="bad sample") as caught:
        unisono.launch(train, str(tmp_path), 9, workers=2)
    place = "This was in step 2, in the forward pass of shard 1, over samples 9, 11."
    assert caught.value.__notes__ == [place]
    assert place in (tmp_path / FAILURE_FILE).read_text()
    unisono.launch(train, str(tmp_path), -1, workers=2)
    assert FAILURE_FILE not in os.listdir(tmp_path)
