"""A replacement that comes when all steps are done says and counts nothing anew."""

import json
import os
import signal
import time
from pathlib import Path

import pytest
import torch
from tests.callbacks.test_callbacks import Seen, data, loss

import unisono
from unisono.callbacks import Callback

PATIENCE_S = 60.0


class DiesAtTheEnd(Callback):
    """Rank 0 is killed in the last validation; the others wait for its replacement."""

    def __init__(self, folder):
        self._folder = Path(folder)

    def on_validation(self, fit, means, seconds):
        if not fit.has_ended:
            return
        killed, come = self._folder / "killed", self._folder / "come"
        if fit.rank == 0 and not killed.exists():
            killed.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        elif fit.rank == 0:
            come.touch()
        end_s = time.monotonic() + PATIENCE_S
        while not come.exists() and time.monotonic() < end_s:
            time.sleep(0.001)


def train(folder, directory=None):
    torch.manual_seed(4)
    model = torch.nn.Linear(3, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    seen = Seen()
    trainer = unisono.Trainer(
        model,
        optimizer,
        loss,
        shards=2,
        directory=directory,
        callbacks=[seen, DiesAtTheEnd(folder)],
    )
    # None is due at the last step: one more comes at the end.
    summary = trainer.fit(data(), batch_size=6, steps=5, validate=data(5), validate_every=2)
    return summary, seen.seen


@pytest.mark.slow
def test_who_finds_all_steps_done_is_told_of_the_end_and_repeats_nothing(tmp_path, capfd):
    (summary, seen), (other, seen_by_other) = unisono.launch(train, tmp_path, workers=2)
    assert seen == ["begin 5", "validation 5", "end 5"]
    changed = "workers_changed 5 (0, 1) worker 0 was killed by SIGKILL"
    assert seen_by_other[-3:] == ["validation 5", changed, "end 5"]
    assert summary == other
    assert (summary.steps, summary.samples) == (5, 30)
    lines = capfd.readouterr().out.splitlines()
    assert [line.partition(":")[0] for line in lines if "validation" in line] == [
        "epoch 1",
        "epoch 2",
        "step 5",
    ]
    assert lines.count(str(summary)) == 1


@pytest.mark.slow
def test_who_replaces_the_only_worker_at_the_end_writes_what_is_missing(tmp_path):
    ((summary, seen),) = unisono.launch(train, tmp_path, tmp_path / "run", workers=1)
    assert seen == [
        "begin 5",
        "validation 5",
        "workers_changed 5 () worker 0 was killed by SIGKILL",
        "end 5",
    ]
    assert str(summary).startswith("5 steps, 30 samples in an unknown time, 2 shards")
    lines = (tmp_path / "run" / "events.jsonl").read_text().splitlines()
    events = [json.loads(line) for line in lines]
    kinds = [event["event"] for event in events if event["event"] not in ("step", "checkpoint")]
    assert kinds == ["start", *["evaluation"] * 3, "workers", "end"]
    assert [event["seconds"] for event in events if event["event"] == "end"] == ["nan"]
