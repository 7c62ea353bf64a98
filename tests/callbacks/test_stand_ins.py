"""What lies under the name of a run's file and is no plain file is refused before training."""

import os

import pytest
import torch
from tests.promises import promise
from tests.test_plainfile import STAND_INS
from torch.utils.data import TensorDataset

import unisono
from unisono.callbacks import BestCheckpoint, Callback, EventLog
from unisono.errors import NotPlainFileError

BINARY = b"a line\nof somebody else's \x00 binary file\n and more"
FILES = {
    "events.jsonl": EventLog,
    "best.safetensors": BestCheckpoint,
}


class Counts(Callback):
    def __init__(self):
        self.num_steps = 0

    def on_step_end(self, fit, step):
        self.num_steps += 1


def fit(directory, *callbacks, epochs=1):
    torch.manual_seed(1)
    model = torch.nn.Linear(4, 2)
    data = TensorDataset(torch.ones(8, 4))
    loss = lambda model, batch: model(batch[0]).square().mean()  # noqa: E731
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trainer = unisono.Trainer(
        model, optimizer, loss, shards=2, directory=directory, callbacks=list(callbacks)
    )
    trainer.fit(data, batch_size=4, epochs=epochs, validate=data)
    return trainer


@pytest.fixture
def outside(tmp_path):
    path = tmp_path / "outside"
    path.write_bytes(BINARY)
    return path


@promise("nothing-lost.15")
@pytest.mark.parametrize(
    ("name", "seen", "is_taken_up"),
    [
        *[("events.jsonl", seen, True) for seen in STAND_INS],
        *[("events.jsonl", seen, False) for seen in list(STAND_INS)[:2]],
        *[("best.safetensors", seen, True) for seen in list(STAND_INS)[:4]],
    ],
)
def test_nothing_is_written_through_it_and_nothing_trained(
    tmp_path, outside, name, seen, is_taken_up
):
    run = tmp_path / "run"
    run.mkdir()
    if is_taken_up:
        fit(run, FILES[name]())
        (run / name).unlink()
    STAND_INS[seen](run / name, outside)
    before = sorted(os.listdir(tmp_path)), os.lstat(run / name).st_ino
    counts = Counts()
    with pytest.raises(NotPlainFileError, match=seen.strip()):
        fit(run, counts, FILES[name](), epochs=2)
    assert counts.num_steps == 0
    assert outside.read_bytes() == BINARY
    assert (sorted(os.listdir(tmp_path)), os.lstat(run / name).st_ino) == before


@pytest.mark.slow
def test_a_directory_that_is_a_link_is_the_users_choice(tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "run").symlink_to("elsewhere")
    fit(tmp_path / "run", BestCheckpoint())
    fit(tmp_path / "run", BestCheckpoint(), epochs=2)
    assert {*FILES, "checkpoints"} <= set(os.listdir(tmp_path / "elsewhere"))


def test_a_link_that_comes_while_a_run_is_under_way_ends_no_run(tmp_path, outside, capsys):
    run = tmp_path / "run"

    class Links(Callback):
        def on_step_end(self, fit, step):
            if step.number == 1:
                (run / "events.jsonl").unlink()
                (run / "events.jsonl").symlink_to(outside)

    trainer = fit(run, Links(), epochs=4)
    assert trainer.run.position.step == 8
    assert outside.read_bytes() == BINARY
    told = capsys.readouterr()
    assert (told.out + told.err).count("training continues") == 1


@pytest.mark.slow
def test_a_program_that_goes_to_another_folder_within_a_fit_keeps_its_files(tmp_path, monkeypatch):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(tmp_path)

    class Goes(Callback):
        def on_step_end(self, fit, step):
            os.chdir(elsewhere)

    fit("run", Goes(), EventLog("all.jsonl"), BestCheckpoint("best.st"), epochs=3)
    assert os.listdir(elsewhere) == []
    assert {"run", "all.jsonl", "best.st", "elsewhere"} == set(os.listdir(tmp_path))
    assert (tmp_path / "all.jsonl").read_text().count('"event":"step"') == 6
