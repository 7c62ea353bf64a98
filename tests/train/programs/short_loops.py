"""Trains in short loops, as PPO does, and signals its own job at the place that it is told.

Arguments: the run directory; the name of the signal, or none; where it comes; in which loop.
"""

import os
import signal
import sys
import time

import psutil
import torch
from torch import nn
from torch.utils.data import TensorDataset

import unisono
from unisono.runtime.workers.context import context

directory, name, place, at = sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4])
LOOPS = 6


def arrive(where, loop):
    """Send the job its signal here, once, and wait until it has got it."""
    if (where, loop) != (place, at) or name == "none":
        return
    launcher = context().launcher
    if unisono.world().rank == 0:
        ours = psutil.Process()
        os.kill(ours.pid if launcher is None else ours.parents()[1].pid, getattr(signal, name))
    while launcher is not None and not launcher.control.head.end:
        time.sleep(0.01)
    print("went on behind the signal", flush=True)


torch.manual_seed(0)
samples = TensorDataset(torch.randn(96, 8), torch.randn(96, 1))
model = nn.Linear(8, 1)
trainer = unisono.Trainer(
    model,
    torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
    lambda model, batch: (model(batch[0]) - batch[1]).square().mean(),
    shards=2,
    directory=directory,
)
run = trainer.run
for loop in range(LOOPS):
    for step in run.steps(samples, batch_size=32, steps=2 * (loop + 1), shuffle=False):
        with step:
            for x, y in step.shards:
                step.backward((model(x) - y).square().mean())
        if step.number == 2 * loop + 1:
            arrive("last step", loop)
        elif place == "break" and loop == at:
            arrive("break", loop)
            break
    arrive("between", loop)
    if place == "evaluate" and loop == at:
        arrive("evaluate", loop)
        trainer.evaluate(samples, batch_size=32)
        print("evaluated", flush=True)
arrive("end", LOOPS)
if unisono.world().rank == 0:
    print("digest", run.digest(), flush=True)
