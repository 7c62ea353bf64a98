"""A run whose newest state is not on the disk says so at its end, and does not end with 0."""

import os
import subprocess
import sys

import pytest
import torch
from tests.promises import promise
from tests.warm.processes import run
from torch.utils.data import TensorDataset

import unisono


def train(directory):
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 1)
    loss = lambda model, batch: model(batch[0]).square().mean()  # noqa: E731
    trainer = unisono.Trainer(
        *(model, torch.optim.SGD(model.parameters(), lr=0.1), loss),
        shards=2,
        directory=directory,
        checkpoint=5,
    )
    trainer.fit(TensorDataset(torch.randn(40, 3)), batch_size=8, steps=10)


@promise("nothing-lost.13")
@pytest.mark.slow
@pytest.mark.parametrize("launched", [True, False], ids=["unisono run", "python"])
@pytest.mark.parametrize(("full_at", "is_told"), [(1, False), (2, True)])
def test_it_is_told_with_what_to_do(tmp_path, launched, full_at, is_told):
    start = ["-m", "unisono", "run", "-n", "2", "--threads", "1"] if launched else []
    environ = os.environ | {"UNISONO_FAULTS": f"disk-full:checkpoint={full_at}"}
    done: subprocess.CompletedProcess[str] = run(
        [sys.executable, *start, __file__, str(tmp_path / "run")], env=environ
    )
    said = done.stdout + done.stderr
    assert said.count("no checkpoint: [Errno 28] No space left on device") == 1, said
    assert said.count("the newest state, of step 10, is NOT on the disk") == is_told, said
    assert done.returncode == int(is_told and launched)
    again = run([sys.executable, *start, __file__, str(tmp_path / "run")])  # there is room now
    assert again.returncode == 0
    assert ("resuming from checkpoint step-000000000005" in again.stdout + again.stderr) == is_told


if __name__ == "__main__":
    train(sys.argv[1])
