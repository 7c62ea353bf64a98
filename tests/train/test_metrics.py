"""The tests of metrics, in a process of their own, which alone loads what they need."""

import sys
from pathlib import Path

import pytest
from tests.warm.processes import run


@pytest.mark.slow
@pytest.mark.timeout(330)
def test_metrics_of_torchmetrics_and_functions_of_scikit_learn():
    tests = [Path(__file__).with_name(f"of_{kind}.py") for kind in ("torchmetrics", "functions")]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:xdist", *tests]
    done = run(command, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
def test_torchmetrics_is_not_loaded_for_those_who_do_not_use_it():
    code = """
import sys, torch, unisono
model = torch.nn.Linear(1, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
trainer = unisono.Trainer(model, optimizer, lambda model, batch: model(batch).mean(), shards=1)
trainer.evaluate(torch.ones(2, 1), batch_size=1)
try:
    trainer.evaluate(torch.ones(2, 1), batch_size=1, metrics={"it": object()})
except TypeError as error:
    assert "derive it from" in str(error)
else:
    raise AssertionError
assert "torchmetrics" not in sys.modules
"""
    run([sys.executable, "-c", code], check=True)
