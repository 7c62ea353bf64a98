"""Weights that nobody has seeded are told once, with the line to add."""

import subprocess
import sys

import pytest
import torch
from tests.promises import promise
from tests.warm import processes

from unisono.runtime.device import drawn_without_seed, generators_put_back
from unisono.runtime.launch.job import fresh_seed

PROGRAM = """
import sys, torch, unisono
from torch.utils.data import DataLoader, TensorDataset

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


@promise("one-result.16")
@pytest.mark.slow
@pytest.mark.parametrize("starter", [(), RUN], ids=["python", "unisono run"])
def test_weights_without_a_seed_are_told_once(script, starter):
    told = said(script, starter=starter)
    assert told.count(NOTICE) == 1
    assert "write `torch.manual_seed(7)` before the model is created" in told
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


LOOKING = """
import hashlib, random, sys
import numpy as np, torch
random.seed(1), np.random.seed(2), torch.manual_seed(3)

def look(where):
    states = random.getstate(), np.random.get_state(legacy=False), torch.get_rng_state().tolist()
    print(where, hashlib.md5(repr(states).encode()).hexdigest(), flush=True)

look("start")
import unisono
from torch.utils.data import DataLoader, TensorDataset
look("import")
model = torch.nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
data = TensorDataset(torch.ones(16, 4))
look("model")
from unisono.callbacks import BestCheckpoint, EMA, EventLog
loss = lambda model, batch: model(batch[0]).square().mean()
trainer = unisono.Trainer(
    model, optimizer, loss, shards=2, directory=sys.argv[1], callbacks=[EMA(0.9)]
)
look("model")
trainer.fit(DataLoader(data, 8, shuffle=True, num_workers=1), epochs=2, validate=data)
look("model")
trainer.evaluate(data, batch_size=8), trainer.predict(data, batch_size=8), trainer.digest()
trainer.save(sys.argv[1] + "/weights.safetensors")
look("model")
run = unisono.Run(model, optimizer, shards=2)
for step in run.steps(data, batch_size=8, steps=2):
    with step:
        for batch in step.shards:
            step.backward(loss(model, batch))
look("model")
"""


@pytest.mark.slow
def test_nothing_of_ours_moves_a_generator_of_the_program(tmp_path):
    script = tmp_path / "looking.py"
    script.write_text(LOOKING)
    # A new interpreter, which has imported nothing yet.
    command = [sys.executable, str(script), str(tmp_path / "alone")]
    alone = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout
    told = [
        {tuple(line.split()) for line in lines.splitlines() if line.split()[0] in states}
        for states in [("start", "import", "model")]
        for lines in (alone, said(script, str(tmp_path / "two"), starter=RUN))
    ]
    assert told[0] == told[1]
    assert len(told[0]) == 3, told
    states = dict(told[0])
    assert states["start"] == states["import"] != states["model"]
