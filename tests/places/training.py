"""Trains for six steps into a directory; does what it is told in the shell before the fourth.

Arguments: the directory; a command of the shell, or nothing.
"""

import subprocess
import sys

import torch
from torch import nn
from torch.utils.data import TensorDataset

import unisono

directory, command = sys.argv[1], " ".join(sys.argv[2:])


class Disturbs(unisono.callbacks.Callback):
    def on_step_begin(self, fit):
        if fit.step == 3 and fit.is_leader and command:
            subprocess.run(command, shell=True, check=True)


torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 1))
trainer = unisono.Trainer(
    model,
    torch.optim.Adam(model.parameters(), lr=0.01),
    lambda model, batch: model(batch[0]).square().mean(),
    shards=2,
    directory=directory,
    checkpoint=1,
    callbacks=[Disturbs()],
)
data = TensorDataset(torch.randn(48, 64))
trainer.fit(data, batch_size=8, steps=6)
trainer.evaluate(data)
if unisono.world().rank == 0:
    print("digest", trainer.digest(), flush=True)
