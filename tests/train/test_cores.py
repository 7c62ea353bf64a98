"""A program that nobody launched says once that it uses one core of many."""

import sys

import pytest
import torch
from tests.classified import by_sign
from tests.classified import cross_entropy as loss

import unisono
from unisono.runtime.device import notices


def trained(shards, use="fit"):
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trainer = unisono.Trainer(model, optimizer, loss, shards=shards)
    if use == "fit":
        trainer.fit(by_sign(), batch_size=8, steps=2)
    else:
        for step in trainer.run.steps(by_sign(), batch_size=8, steps=2):
            with step:
                for batch in step.shards:
                    step.backward(loss(model, batch))


def of_four_cores():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("os.sched_getaffinity", lambda _: set(range(16)))
        patch.delenv("UNISONO_THREADS", raising=False)
        notices().clear()
        trained(4)


@pytest.mark.slow
@pytest.mark.parametrize("use", ["fit", "steps"])
def test_one_line_names_the_command_that_uses_all_cores(use, monkeypatch, capsys):
    monkeypatch.delenv("UNISONO_THREADS", raising=False)
    monkeypatch.setattr(sys.modules["__main__"], "__file__", "/home/me/train.py", raising=False)
    for cores, shards, count in ((16, 8, 1), (4, 8, 1), (2, 8, 0), (16, 1, 0)):
        notices().clear()
        monkeypatch.setattr("os.sched_getaffinity", lambda _, n=cores: set(range(n)))
        trained(shards, use)
        trained(shards, use)
        said = capsys.readouterr()
        command = f"`unisono run -n {min(cores, shards)} train.py` uses"
        assert (said.out + said.err).count(command) == count
    notices().clear()
    monkeypatch.delattr(sys.modules["__main__"], "__file__")
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(16)))
    trained(4, use)
    said = capsys.readouterr()
    assert "`unisono.launch(function, workers=4)` uses 4 of them" in said.out + said.err
    notices().clear()
    monkeypatch.setenv("UNISONO_THREADS", "1")  # it knows
    trained(4, use)
    said = capsys.readouterr()
    assert "uses 4 of them" not in said.out + said.err


@pytest.mark.slow
def test_workers_say_nothing_of_it(capfd):
    unisono.launch(of_four_cores, workers=1)
    said = capfd.readouterr()
    assert "uses 4 of them" not in said.out + said.err
