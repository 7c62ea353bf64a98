"""Whoever comes later finds what was there between two loops, as if it had been there."""

from __future__ import annotations

import contextlib
import functools
import io
import json
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.classified import cross_entropy
from tests.parity import cases
from tests.promises import promise
from tests.train import test_whole_state as whole
from torch import nn

import unisono
from unisono.callbacks import EarlyStopping
from unisono.errors import CheckpointError


def note(files: Path, name: str, model: nn.Module, **seen: Any) -> None:
    """Write what rank 0 sees here, over what is there: the weights, and what was computed."""
    if unisono.world().rank == 0:
        text = json.dumps({"weights": model.state_dict(), **seen}, default=torch.Tensor.tolist)
        (files / f"{name}.json").write_text(text)


def kept(directory: Path | None, **options: Any) -> dict[str, Any]:
    return {} if directory is None else {"directory": directory, **options}


def unfreezes(directory: Path | None, files: Path, last: int = 12) -> str:
    """Train the head until a callback stops that, then another layer too, then on."""
    torch.manual_seed(11)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.BatchNorm1d(8), nn.Linear(8, 10))
    optimizer = torch.optim.Adam(model[3].parameters(), lr=1e-2)
    trainer = unisono.Trainer(
        *(model, optimizer, cases.classify), shards=4, **kept(directory, checkpoint=2)
    )
    data = torch.utils.data.Subset(cases.images(), range(40))
    for name, steps in (("head", 8), ("more", 7), ("all", last)):
        stops = EarlyStopping(patience=1, min_delta=9.0)
        if name == "head":
            trainer.callbacks = [stops]
        trainer.fit(data, batch_size=20, steps=steps, validate=data, validate_every=1)
        trainer.callbacks = []
        seen = trainer.evaluate(data, batch_size=20) | {"step": trainer.run.position.step}
        note(files, name, model, seen=seen, digest=trainer.digest(), lr=optimizer.param_groups)
        if name == "head":
            optimizer.add_param_group({"params": list(model[1].parameters()), "lr": 1e-3})
        optimizer.param_groups[0]["lr"] *= 0.5
    return trainer.digest()


def breaks(directory: Path | None, files: Path, last: int = 12) -> str:
    """Leave a loop of its own early, change a weight, and train on."""
    torch.manual_seed(12)
    model = nn.Sequential(nn.Linear(3, 6), nn.BatchNorm1d(6), nn.Dropout(0.2), nn.Linear(6, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    run = unisono.Run(model, optimizer, shards=4, **kept(directory, checkpoint=1))
    run.state["seen"] = 0
    data = torch.utils.data.TensorDataset(torch.randn(24, 3), torch.arange(24) % 2)
    for number, steps in enumerate((9, last)):
        for step in run.steps(data, batch_size=8, steps=steps):
            with step:
                for batch in step.shards:
                    step.backward(cross_entropy(model, batch))
            if not step.is_done:
                continue
            run.state["seen"] += 1
            if not number and run.state["seen"] == 4:
                break
        note(files, f"loop {number}", model, state=dict(run.state), position=str(run.position))
        with torch.no_grad():
            model[0].weight.mul_(0.5)
    return run.digest()


def takes_whole(directory: Path | None, files: Path, last: int = 12) -> str:
    """Have an optimizer that is not element-wise, and predict in between."""
    saving = unisono.Checkpoint(1, keep=1)
    trainer = whole.trained(whole.Madgrad, [2], **kept(directory, checkpoint=saving))
    for number, steps in enumerate((5, last)):
        outputs = trainer.predict(whole.images(), batch_size=10)
        note(files, f"before {number}", trainer.run.model, outputs=outputs, digest=trainer.digest())
        trainer.fit(whole.images(), batch_size=10, steps=steps)
    return trainer.digest()


def calls_often(directory: Path | None, files: Path, last: int = 12) -> str:
    """Call `fit` for each step: more loops than what is kept of them in memory."""
    torch.manual_seed(13)
    model = nn.Linear(4, 2)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    trainer = unisono.Trainer(model, optimizer, cross_entropy, shards=4, directory=directory)
    data = torch.utils.data.TensorDataset(torch.randn(16, 4), torch.arange(16) % 2)
    for steps in range(1, last + 1):
        trainer.fit(data, batch_size=8, steps=steps)
        note(files, f"step {steps}", model, seen=trainer.evaluate(data, batch_size=8))
    return trainer.digest()


PROGRAMS = [unfreezes, breaks, takes_whole]


def silent(program: Any, *args: Any) -> str:
    with contextlib.redirect_stdout(io.StringIO()):
        return program(*args)


pytestmark = pytest.mark.slow

EACH = pytest.mark.parametrize("program", PROGRAMS, ids=lambda one: one.__name__)


def written(files):
    return {path.name: path.read_text() for path in files.glob("*.json")}


@functools.cache
def undisturbed(program):
    with tempfile.TemporaryDirectory() as files:
        return silent(program, None, Path(files)), written(Path(files))


@promise("conditions.1")
@pytest.mark.slow
@pytest.mark.parametrize(
    ("program", "workers"),
    [
        (unfreezes, 2),
        (breaks, 1),
        (takes_whole, 3),
        (calls_often, 2),
    ],
)
def test_a_replacement_writes_what_was_there(program, workers, monkeypatch, tmp_path):
    monkeypatch.setenv("UNISONO_FAULTS", "kill:rank=0,step=10")
    for directory in (None, tmp_path / "run"):
        for file in tmp_path.glob("*.json"):
            file.unlink()
        digests = unisono.launch(silent, program, directory, tmp_path, workers=workers)
        assert digests == [undisturbed(program)[0]] * workers
        assert written(tmp_path) == undisturbed(program)[1]


def leaves_what_cannot_be_saved(directory: Path, loops: int) -> None:
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run = unisono.Run(model, optimizer, shards=2, directory=directory)
    data = torch.utils.data.TensorDataset(torch.ones(8, 3))
    for _ in range(loops):
        for step in run.steps(data, batch_size=4, steps=4):
            with step:
                for (rows,) in step.shards:
                    step.backward(model(rows).mean())
            run.state["lock"] = threading.Lock()
            break


@promise("nothing-lost.13")
@pytest.mark.parametrize("loops", [1, 2])
def test_a_loop_that_is_left_and_not_saved_ends_the_program(tmp_path, capfd, loops):
    """Python discards what is raised where a `break` closes the steps."""
    with pytest.raises(CheckpointError, match="`lock` in"):
        unisono.launch(leaves_what_cannot_be_saved, tmp_path, loops, workers=2)
    assert "that was left at step 1 is not saved: `lock` in" in capfd.readouterr().err


@promise("conditions.1")
@EACH
def test_a_resumed_run_writes_what_was_there(program, tmp_path):
    silent(program, tmp_path / "run", tmp_path, 10)
    assert silent(program, tmp_path / "run", tmp_path) == undisturbed(program)[0]
    assert written(tmp_path) == undisturbed(program)[1]


@pytest.mark.slow
@pytest.mark.parametrize("program", [unfreezes, breaks])
def test_others_that_resume_and_lose_one_write_what_was_there(program, monkeypatch, tmp_path):
    unisono.launch(silent, program, tmp_path / "run", tmp_path, 10, workers=3)
    monkeypatch.setenv("UNISONO_FAULTS", "kill:rank=0,step=11")
    digests = unisono.launch(silent, program, tmp_path / "run", tmp_path, workers=2)
    assert digests == [undisturbed(program)[0]] * 2
    assert written(tmp_path) == undisturbed(program)[1]


def left_and_killed(kind):
    """Leave a loop by `break`; then a worker is killed in the next one."""
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    optimizer = getattr(torch.optim, kind)(model.parameters(), lr=0.01)
    run = unisono.Run(model, optimizer, shards=4)
    data = torch.utils.data.TensorDataset(torch.randn(24, 3), torch.arange(24) % 2)
    for steps in (9, 12):
        for step in run.steps(data, batch_size=8, steps=steps):
            with step:
                for batch in step.shards:
                    step.backward(cross_entropy(model, batch))
            if step.is_done and run.position.step == 4:
                break
    return run.digest()


@promise("where-it-ends.4")
@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "exchange", "ends"),
    [("Adam", "auto", False), ("Adafactor", "auto", False), ("Adafactor", "shared", True)],
)
def test_after_a_break_a_loss_ends_the_run_if_one_worker_has_the_state(
    monkeypatch, kind, exchange, ends
):
    expected = left_and_killed(kind)
    monkeypatch.setenv("UNISONO_EXCHANGE", exchange)
    monkeypatch.setenv("UNISONO_FAULTS", "kill:rank=1,step=8")
    if ends:
        with pytest.raises(unisono.errors.WorkerError, match="a loop was left before its end"):
            unisono.launch(left_and_killed, kind, workers=2)
    else:
        assert unisono.launch(left_and_killed, kind, workers=2) == [expected] * 2


HOLDS_ITS_STEPS = """
import sys, torch, unisono
torch.manual_seed(0)
model = torch.nn.Linear(3, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
run = unisono.Run(model, optimizer, shards=2, directory=sys.argv[1])
data = torch.utils.data.TensorDataset(torch.randn(40, 3))
steps = run.steps(data, batch_size=4, epochs=2)
for _ in range(7):
    with next(steps) as step:
        for (rows,) in step.shards:
            step.backward(model(rows).mean())
if len(sys.argv) > 2:
    raise ValueError("by the program")
"""


@pytest.mark.slow
@pytest.mark.parametrize("way", [[], ["-m", "unisono", "run", "-n", "2"]], ids=["alone", "two"])
@pytest.mark.parametrize("raises", [[], ["raises"]], ids=["ends", "raises"])
def test_a_loop_that_the_program_still_has_at_its_end_is_saved(tmp_path, way, raises):
    program = tmp_path / "program.py"
    program.write_text(HOLDS_ITS_STEPS)
    command = [sys.executable, *way, str(program), str(tmp_path / "run"), *raises]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode != 0) == bool(raises), done.stderr
    assert "not saved" not in done.stderr
    assert [each.name for each in (tmp_path / "run" / "checkpoints").iterdir()] == [
        "step-000000000007"
    ]
