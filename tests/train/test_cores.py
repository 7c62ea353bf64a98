"""A program that nobody launched says once that it uses one core of many."""

import sys

import pytest
import torch
from tests.classified import by_sign, cross_entropy, taken

import unisono
from unisono.runtime.device import notices


def trained(shards, use="fit", cores=16):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("os.sched_getaffinity", lambda _: set(range(cores)))
        model = torch.nn.Linear(4, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        trainer = unisono.Trainer(model, optimizer, cross_entropy, shards=shards)
        if use == "fit":
            trainer.fit(by_sign(), batch_size=8, steps=2)
        else:
            list(taken(trainer.run, cross_entropy, by_sign(), batch_size=8, steps=2))


@pytest.mark.slow
@pytest.mark.parametrize("use", ["fit", "steps"])
def test_one_line_names_the_command_that_uses_all_cores(use, monkeypatch, capsys):
    monkeypatch.delenv("UNISONO_THREADS", raising=False)
    monkeypatch.setattr(sys.modules["__main__"], "__file__", "/home/me/train.py", raising=False)
    for cores, shards, count in ((16, 8, 1), (4, 8, 1), (2, 8, 0), (16, 1, 0), (16, 8, 0)):
        if (cores, count) == (16, 0) and shards > 1:
            monkeypatch.setenv("UNISONO_THREADS", "1")  # it knows
        notices().clear()
        trained(shards, use, cores)
        trained(shards, use, cores)
        said = capsys.readouterr()
        command = f"`unisono run -n {min(cores, shards)} train.py`, or `unisono.launch(function, "
        assert (said.out + said.err).count(command) == count


def trained_in_a_worker():
    notices().clear()
    trained(4)


@pytest.mark.slow
def test_workers_say_nothing_of_it(capfd, monkeypatch):
    monkeypatch.delenv("UNISONO_THREADS", raising=False)
    unisono.launch(trained_in_a_worker, workers=1)
    said = capfd.readouterr()
    assert "uses 4 of them" not in said.out + said.err
