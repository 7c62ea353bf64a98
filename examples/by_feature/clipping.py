"""Clip the norm of the gradients of the global batch, and see how large it was in each step."""

import torch
import torch.nn.functional as F
from torch import nn

import unisono
from unisono.callbacks import Callback
from unisono.data import digits

LARGEST = 0.5


class CountClipped(Callback):
    """Counts the steps of an epoch whose gradients were clipped."""

    clipped = 0

    def on_step_end(self, fit, step):
        self.clipped += step.gradient_norm > LARGEST

    def on_epoch_end(self, fit):
        fit.say(f"epoch {fit.epoch}: {self.clipped} steps clipped")
        self.clipped = 0


def loss(model, batch):
    images, labels = batch
    return F.cross_entropy(model(images), labels)


def main():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    # `clip_value=` limits each element instead; {"actor": 0.5, …} is for several optimizers.
    trainer = unisono.Trainer(
        model, optimizer, loss, shards=4, clip_norm=LARGEST, callbacks=[CountClipped()]
    )
    trainer.fit(digits(), batch_size=64, epochs=3, validate=digits(train=False))


if __name__ == "__main__":
    main()
