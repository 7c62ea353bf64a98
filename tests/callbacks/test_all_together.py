"""Every callback there is, at once: lost workers leave the same files and the same numbers."""

import functools
import json
import warnings

import pytest
import torch
from tests.callbacks.test_loggers import tensorboard
from tests.parity import cases

import unisono
from unisono import callbacks as module
from unisono.callbacks import (
    EMA,
    BestCheckpoint,
    Callback,
    EarlyStopping,
    EventLog,
    MLflow,
    Progress,
    RayTrain,
    TensorBoard,
    WandB,
)

pytest.importorskip("tensorboard")


def train(directory, epochs=6, **options):
    torch.manual_seed(11)
    model = cases.Cnn(norm=True)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)
    ema, best = EMA(0.9), BestCheckpoint()
    trainer = unisono.Trainer(
        model,
        optimizer,
        cases.classify,
        shards=3,
        directory=directory,
        schedule=schedule,
        clip_norm=1.0,
        callbacks=[
            ema,
            best,
            EarlyStopping(50),
            TensorBoard(),
        ],
        **options,
    )
    trainer.fit(
        cases.images(),
        batch_size=cases.BATCH_SIZE,
        epochs=epochs,
        validate=cases.images(),
        validate_every=4,
    )
    averages = sum(value.double().sum().item() for value in ema.weights.values())
    return trainer.digest(), averages, ema.num_averaged, best.best, best.step


def files_of(directory):
    """What is in the files of a run, without what differs from run to run."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        curves, _, _ = tensorboard(directory)
    lines = [json.loads(line) for line in (directory / "events.jsonl").read_text().splitlines()]
    return {
        "best": (directory / "best.safetensors").read_bytes(),
        "curves": curves,
        "steps": [(one["step"], one["means"]) for one in lines if one["event"] == "step"],
        "found": [(one["step"], one["means"]) for one in lines if one["event"] == "evaluation"],
    }


def test_all_of_them_are_here():
    """Who adds a callback adds it to this program."""
    # Those that others have written follow one contract: test_loggers.py.
    usual = {Progress, EventLog, EMA, BestCheckpoint, EarlyStopping, TensorBoard}
    public = {getattr(module, name) for name in module.__all__}
    kinds = {one for one in public if isinstance(one, type) and issubclass(one, Callback)}
    of_others = {MLflow, RayTrain, WandB}
    assert kinds - of_others - {Callback} == usual


@pytest.mark.slow
@pytest.mark.parametrize(
    "faults",
    [
        pytest.param(
            "kill:rank=0,step=9,at=update; kill:rank=1,step=20,at=gradients",
            marks=pytest.mark.long,
        ),
        "kill:rank=1,step=7,at=updated; kill:rank=0,step=13,at=commit; kill:rank=0,step=30",
    ],
)
def test_lost_workers_leave_the_same_files(tmp_path, monkeypatch, faults):
    alone = train(tmp_path / "alone")
    monkeypatch.setenv("UNISONO_FAULTS", faults)
    often = functools.partial(train, checkpoint=unisono.Checkpoint(5, keep=2))
    results = unisono.launch(often, tmp_path / "two", workers=2)
    assert results == [alone] * 2
    expected, found = files_of(tmp_path / "alone"), files_of(tmp_path / "two")
    for name in expected:
        assert found[name] == expected[name], name
