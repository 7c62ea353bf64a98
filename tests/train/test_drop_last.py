"""The last batch of an epoch may be left out, on any number of workers and in a resumed run."""

import contextlib
import io

import pytest
import torch
from tests.classified import at_random, taken
from tests.classified import cross_entropy as loss_of
from torch import nn
from torch.utils.data import DataLoader

import unisono

DATA = at_random(45, 8, 4, seed=3)  # of four shards of the last of batches of 10, one has 2


def make(**options):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return unisono.Trainer(model, optimizer, loss_of, shards=4, callbacks=[], **options)


def fitted(data=DATA, *, epochs=3, directory=None, **reading):
    trainer = make(directory=directory)
    with contextlib.redirect_stdout(io.StringIO()):
        trainer.fit(data, epochs=epochs, **reading)
    return trainer.run.position.step, trainer.digest()


def without_last(directory=None, epochs=3):
    run = make().run
    with contextlib.redirect_stdout(io.StringIO()):
        for _ in taken(run, loss_of, DATA, batch_size=10, epochs=2, drop_last=True):
            pass
    how = {"batch_size": 10, "drop_last": True, "epochs": epochs, "directory": directory}
    return fitted(**how), run.digest()


@pytest.mark.slow
def test_the_last_batch_of_an_epoch_may_be_left_out(monkeypatch, tmp_path):
    alone = without_last()
    assert alone[0][0] == 12
    assert fitted(DataLoader(DATA, 10, shuffle=True, drop_last=True)) == alone[0]
    without_last(tmp_path, epochs=2)
    monkeypatch.setenv("UNISONO_FAULTS", "kill:rank=0,step=6")
    assert unisono.launch(without_last, workers=2) == [alone] * 2
    assert unisono.launch(without_last, tmp_path, workers=3) == [alone] * 3


def test_a_shard_with_one_sample_is_refused_by_torch_with_its_place():
    with pytest.raises(ValueError, match="Expected more than 1 value per channel") as raised:
        fitted(batch_size=10)
    (note,) = raised.value.__notes__
    assert note.startswith("This was in step 4, in the forward pass of shard 1, over sample ")


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ({"sampler": lambda epoch, seed: [0, 1, 2]}, "`drop_last=True` and a sampler"),
        ({"batch_size": 64}, "must leave one batch of 64 at least, but .* only 45 samples"),
    ],
)
def test_what_leaves_no_last_batch_out_is_refused(how, words):
    with pytest.raises(ValueError, match=words):
        make().fit(DATA, **{"batch_size": 10, "epochs": 1, "drop_last": True, **how})
    with pytest.raises(ValueError, match="`drop_last` must be left out where a DataLoader"):
        make().fit(DataLoader(DATA, 10), epochs=1, drop_last=True)
