"""A run says itself what slows it: here one worker has more to do between steps than the other.

unisono run -n 2 examples/by_feature/why_slow.py
"""

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
    trainer = unisono.Trainer(model, optimizer, loss, shards=4, callbacks=[Logging()])
    data = TensorDataset(inputs, inputs.sum(1, keepdim=True))
    summary = trainer.fit(data, batch_size=64, steps=250)
    # The same text that is printed at the end of the run; `unisono report` has more of it.
    if unisono.world().rank == 0:
        print(f"what a program can read: {summary.slowness or 'nothing costs more than 5 %'}")


if __name__ == "__main__":
    main()
