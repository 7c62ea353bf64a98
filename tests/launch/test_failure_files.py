"""What a job that failed leaves in its run directory."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import unisono
from unisono.runtime.launch import policy
from unisono.runtime.launch.exceptions import (
    JSON_NAME,
    TEXT_NAME,
    failure_facts,
    remove_failure,
    write_failure,
)
from unisono.runtime.launch.report import failure_message
from unisono.runtime.workers.launcher_messages import ProgramFailed


def said(summary: str, waited_for: int | None = None) -> ProgramFailed:
    return ProgramFailed(1, summary, f"Traceback …\n{summary}", waited_for, False, b"")


def failed(*failures: policy.WorkerFailure) -> policy.JobState:
    state = policy.start(3)
    for failure in failures:
        state = policy.failed(state, failure, 0.0).state
    return state


RAISED = policy.WorkerFailure(1, 1, said("KeyError: 'a'"))
KILLED = policy.WorkerFailure(2, -9)
MISSED = policy.WorkerFailure(0, 1, said("PeerLostError: …", waited_for=1))


def test_the_cause_is_told_first_and_what_followed_after_it() -> None:
    facts = failure_facts(failed(MISSED, RAISED), 3, {1: 57}.get)
    assert {name: facts[name] for name in ("rank", "step", "world_size", "exit_code")} == {
        "rank": 1,
        "step": 57,
        "world_size": 3,
        "exit_code": 1,
    }
    assert (facts["error"], facts["signal"]) == ("KeyError: 'a'", None)
    assert facts["traceback"].endswith("KeyError: 'a'")
    assert facts["message"] == failure_message(failed(MISSED, RAISED), 3)
    assert [(one["rank"], one["waited_for"]) for one in facts["others"]] == [(0, 1)]


@pytest.mark.parametrize(
    ("exit_code", "name"), [(-9, "SIGKILL"), (-64, "SIGRTMAX"), (-99, "signal 99"), (3, None)]
)
def test_signals_are_named(exit_code: int, name: str | None) -> None:
    facts = failure_facts(failed(policy.WorkerFailure(2, exit_code)), 3, {}.get)
    assert (facts["signal"], facts["step"], facts["error"]) == (name, None, "")


def test_a_lost_server_has_no_rank() -> None:
    state = policy.server_lost(policy.start(3), -9).state
    assert failure_facts(state, 3, {}.get)["rank"] is None


def test_files_are_written_and_removed(tmp_path: Path) -> None:
    told: list[str] = []
    facts = failure_facts(failed(KILLED), 3, {}.get)
    write_failure([tmp_path], facts, told.append)
    assert json.loads((tmp_path / JSON_NAME).read_text()) == facts
    assert (tmp_path / TEXT_NAME).read_text() == f"{facts['message']}\n"
    remove_failure([tmp_path, tmp_path / "not there"])
    assert (os.listdir(tmp_path), told) == ([], [])


@pytest.mark.parametrize(
    "spoil", [lambda path: path.symlink_to("/etc/passwd"), lambda path: path.mkdir()]
)
def test_what_cannot_be_written_is_said(tmp_path: Path, spoil: Callable[[Path], None]) -> None:
    told: list[str] = []
    spoil(tmp_path / TEXT_NAME)
    write_failure([tmp_path], failure_facts(failed(KILLED), 3, {}.get), told.append)
    write_failure([tmp_path / "not there"], failure_facts(failed(KILLED), 3, {}.get), told.append)
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
def test_a_run_that_fails_leaves_them_and_one_that_ends_well_removes_them(tmp_path: Path) -> None:
    with pytest.raises(KeyError, match="bad sample") as caught:
        unisono.launch(train, str(tmp_path), 9, workers=2)
    place = "This was in step 2, in the forward pass of shard 1, over samples 9, 11."
    assert caught.value.__notes__ == [place]
    facts = json.loads((tmp_path / JSON_NAME).read_text())
    assert (facts["rank"], facts["step"], facts["error"]) == (1, 2, "KeyError: 'bad sample'")
    assert place in (tmp_path / TEXT_NAME).read_text()
    unisono.launch(train, str(tmp_path), -1, workers=2)
    assert not {TEXT_NAME, JSON_NAME} & set(os.listdir(tmp_path))
