"""Weights that nobody has seeded are told once, with the line to add."""

import sys

import pytest
import torch
from tests.warm import processes

from unisono.device import drawn_without_seed, generators_put_back
from unisono.seeding import fresh_seed

PROGRAM = """
import sys, torch, unisono
from torch.utils.data import TensorDataset

def main(first="pass", between="pass"):
    exec(first)
    model = torch.nn.Linear(4, 2)
    exec(between, {"torch": torch, "model": model})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    inputs = torch.ones(8, 4)
    loss = lambda model, batch: model(batch[0]).square().mean()
    for directory in (None, sys.argv[3] if len(sys.argv) > 3 else None):
        trainer = unisono.Trainer(model, optimizer, loss, shards=2, seed=7, directory=directory)
        trainer.fit(TensorDataset(inputs), batch_size=4, steps=3)

if __name__ == "__main__":
    main(*sys.argv[1:3])
"""
NOTICE = "without a seed"


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "program.py"
    path.write_text(PROGRAM)
    return path


def said(script, *arguments, starter=()):
    done = processes.run([sys.executable, *starter, str(script), *arguments], timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


RUN = ("-m", "unisono", "run", "-n", "2")


@pytest.mark.slow
@pytest.mark.parametrize("starter", [(), RUN], ids=["python", "unisono run"])
def test_weights_without_a_seed_are_told_once(script, starter):
    told = said(script, starter=starter)
    assert told.count(NOTICE) == 1
    assert "write `torch.manual_seed(7)` before the model is made" in told
    seeded = said(script, "torch.manual_seed(3)", starter=starter)
    assert NOTICE not in seeded


@pytest.mark.slow
def test_who_launches_without_a_seed_is_told(tmp_path, script):
    launching = tmp_path / "launching.py"
    launching.write_text(
        f"import sys, torch, unisono\nsys.path.insert(0, {str(tmp_path)!r})\nimport program\n"
        "if __name__ == '__main__':\n    exec(sys.argv[1])\n"
        "    unisono.launch(program.main, workers=2)\n"
    )
    assert said(launching, "pass").count(NOTICE) == 1
    assert NOTICE not in said(launching, "torch.manual_seed(3)")


@pytest.mark.slow
def test_a_run_that_goes_on_is_not_told(tmp_path, script):
    directory = str(tmp_path / "run")
    assert NOTICE not in said(script, "torch.manual_seed(3)", "pass", directory)
    again = script.with_name("again.py")
    again.write_text(PROGRAM.replace("(None, sys.argv[3]", "(sys.argv[3], sys.argv[3]"))
    assert NOTICE not in said(again, "pass", "pass", directory)


@pytest.mark.parametrize(
    ("seed", "draws", "is_told"),
    [
        *((0, True, False), (2**32 + 1, True, False), (-1, True, False)),
        *(("fresh", True, True), ("fresh", False, False)),
    ],
)
def test_only_what_was_drawn_without_a_seed_counts(seed, draws, is_told):
    with generators_put_back():
        torch.manual_seed(fresh_seed() if seed == "fresh" else seed)
        if draws:
            torch.rand(1)
        assert drawn_without_seed() == is_told
