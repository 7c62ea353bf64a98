"""A run says itself what slows it: here one worker has more to do between steps than the other.

unisono run -n 2 examples/by_feature/why_slow.py
"""

import tempfile
import time

import torch
from torch import nn
from torch.utils.data import TensorDataset

import unisono
from unisono.callbacks import Callback


class Logging(Callback):
    """Code for rank 0 alone, of which nobody knows that it takes long."""

    def on_step_end(self, fit, step):
        if fit.rank == 0:
            time.sleep(0.004)


def loss(model, batch):
    inputs, targets = batch
    return nn.functional.mse_loss(model(inputs), targets)


def main():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 256), nn.Tanh(), nn.Linear(256, 1))
    inputs = torch.randn(4096, 32)
    optimizer = torch.optim.Adam(model.parameters())
    data = TensorDataset(inputs, inputs.sum(1, keepdim=True))
    # What slows a run is found in its event file, so it needs a directory.
    with tempfile.TemporaryDirectory() as directory:
        trainer = unisono.Trainer(
            model, optimizer, loss, shards=4, directory=directory, callbacks=[Logging()]
        )
        trainer.fit(data, batch_size=64, steps=250)


if __name__ == "__main__":
    main()
