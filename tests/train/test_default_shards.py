"""Where `shards` is left out, S follows from the global batch alone, and stays for the run."""

import contextlib
import io

import pytest
import torch
from tests.classified import at_random, taken
from tests.classified import cross_entropy as loss_of

import unisono

DATA = at_random(96, 8, 4, seed=3)


def make(**options):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 40), torch.nn.ReLU(), torch.nn.Linear(40, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return unisono.Trainer(model, optimizer, loss_of, callbacks=[], **options)


def fitted(batch_size, steps=4, **options):
    with contextlib.redirect_stdout(io.StringIO()):
        trainer = make(**options)
        summary = trainer.fit(DATA, batch_size=batch_size, steps=steps)
    return summary.digest, summary.shards


def two_programs():
    """Say S and the digest of a trainer and of a loop of the program's own, with evaluations."""
    trainer = make()
    assert trainer.run.shards is None
    small = trainer.evaluate(DATA, batch_size=1)  # one shard, before and after the loop
    first, number = fitted(48)
    run = make().run
    for _ in taken(run, loss_of, DATA, batch_size=16, epochs=1):
        pass
    for _ in taken(run, loss_of, DATA, batch_size=96, steps=8):  # keeps that of the first loop
        pass
    return first, number, run.digest(), run.shards, small


@pytest.mark.slow
def test_every_number_of_workers_and_of_cores_has_the_same(monkeypatch):
    alone = two_programs()
    assert (alone[1], alone[3]) == (4, 2)
    assert alone[0] == fitted(48, shards=4)[0] != fitted(48, shards=1)[0]
    assert unisono.launch(two_programs, workers=2) == [alone] * 2
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(64)))
    assert two_programs() == alone


@pytest.mark.slow
def test_more_workers_than_the_default_are_told_what_to_write():
    words = (
        r"at least the number of workers \(3\), but is 2, the default for `batch_size=16`: pass "
        r"`shards=3` or start fewer workers"
    )
    with pytest.raises(ValueError, match=words):
        unisono.launch(fitted, 16, workers=3)
    (result, *_) = unisono.launch(fitted, 16, 4, workers=2)
    assert result == fitted(16)


@pytest.mark.slow
def test_a_resumed_run_keeps_the_number_of_its_checkpoint(tmp_path):
    whole = fitted(48, shards=3)
    fitted(48, steps=2, shards=3, directory=tmp_path)
    (resumed, _) = unisono.launch(fitted, 48, 4, workers=2)
    assert resumed != whole
    (resumed, _) = unisono.launch(resumed_in, tmp_path, workers=2)
    assert resumed == whole


def resumed_in(directory):
    return fitted(48, directory=directory)
