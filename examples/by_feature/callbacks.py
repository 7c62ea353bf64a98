"""Write a callback of your own, beside those that come with Unisono.

It sees the same values on every worker, writes once, and continues where a resumed run was.
"""

import tempfile
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

import unisono
from unisono.callbacks import Callback, CSVLog
from unisono.data import digits


class SmoothLoss(Callback):
    """Prints a moving average of the loss at the end of each epoch."""

    def __init__(self):
        self.average = None

    def on_step_end(self, fit, step):
        loss = step.means["loss"]
        self.average = loss if self.average is None else 0.9 * self.average + 0.1 * loss

    def on_epoch_end(self, fit):
        fit.say(f"epoch {fit.epoch}: smooth loss {self.average:.4f}")

    def state_dict(self):
        return {"average": self.average}

    def load_state_dict(self, state):
        self.average = state["average"]


def loss(model, batch):
    images, labels = batch
    return F.cross_entropy(model(images), labels)


def main(folder):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    callbacks = [SmoothLoss(), CSVLog()]
    trainer = unisono.Trainer(
        model, optimizer, loss, shards=4, directory=folder, callbacks=callbacks
    )
    trainer.fit(digits(), batch_size=64, epochs=3, validate=digits(train=False))
    if unisono.world().rank == 0:
        print((Path(trainer.directory) / "steps.csv").read_text())


if __name__ == "__main__":
    # If workers pass different directories, all take rank 0's.
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        main(folder)
