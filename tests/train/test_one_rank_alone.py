"""`digest` and `save` need no meeting: whatever rank calls them, and wherever."""

import contextlib
import io

import pytest
import torch
from safetensors.torch import load_file
from tests.classified import at_random, taken
from tests.classified import cross_entropy as loss_of
from tests.train import test_whole_state as whole

import unisono
from unisono.callbacks import Callback

DATA = at_random(40, 8, 4, seed=3)


class Says(Callback):
    """Notes the digest within `fit`, on one rank, and saves the weights."""

    def __init__(self, rank, path):
        self.rank, self.path, self.trainer = rank, path, None

    def on_step_end(self, fit, step):
        if fit.rank == self.rank and step.number == 3:
            with open(f"{self.path}.within", "w") as file:
                file.write(self.trainer.digest())
            self.trainer.save(f"{self.path}.3")


def of_two_fits(rank, path):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.BatchNorm1d(16))
    model.append(torch.nn.Linear(16, 4))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    says = Says(rank, path)
    trainer = unisono.Trainer(model, optimizer, loss_of, shards=4, callbacks=[says])
    says.trainer = trainer
    return alone_between(trainer, rank, path)


def of_a_whole_update(rank, path):
    trainer = whole.trained(whole.Madgrad, [2])
    return alone_between(trainer, rank, path, whole.images(), batch_size=10)


def alone_between(trainer, rank, path, data=DATA, batch_size=20):
    with contextlib.redirect_stdout(io.StringIO()):
        trainer.fit(data, batch_size=batch_size, steps=4)
    if unisono.world().rank == rank:
        with open(f"{path}.digest", "w") as file:
            file.write(trainer.digest())
        trainer.save(f"{path}.between")
    for _ in taken(trainer.run, loss_of, data, batch_size=batch_size, steps=8):
        pass
    trainer.save(f"{path}.end")
    return trainer.digest()


def written(folder):
    return {
        path.suffix: load_file(path)
        if path.suffix in (".3", ".between", ".end")
        else path.read_text()
        for path in folder.iterdir()
    }


def same(one, other):
    return one.keys() == other.keys() and all(
        all(torch.equal(one[name][key], value) for key, value in found.items())
        if isinstance(found, dict)
        else one[name] == found
        for name, found in other.items()
    )


@pytest.mark.slow
@pytest.mark.parametrize("program", [of_two_fits, of_a_whole_update])
def test_any_rank_may_call_them_alone(program, tmp_path, monkeypatch):
    (tmp_path / "one").mkdir()
    digest = program(0, tmp_path / "one" / "at")
    expected = written(tmp_path / "one")
    ways = [("auto", 0, 2, "7"), ("auto", 1, 2, "7"), ("staged", 1, 3, "6"), ("gloo", 1, 2, "")]
    for exchange, rank, workers, killed_at in ways:
        folder = tmp_path / f"{exchange}-{rank}"
        folder.mkdir()
        fault = f"kill:rank={rank},step={killed_at}" if killed_at else ""
        monkeypatch.setenv("UNISONO_FAULTS", fault)
        monkeypatch.setenv("UNISONO_EXCHANGE", exchange)
        found = unisono.launch(program, rank, folder / "at", workers=workers)
        assert found == [digest] * workers
        assert same(written(folder), expected), (exchange, rank)
