"""Kill a worker in the midst of training: the others continue, and the result is the same.

python examples/by_feature/lost_worker.py              # nobody is killed: one worker
unisono run -n 2 examples/by_feature/lost_worker.py    # worker 1 kills itself in step 30
"""

import os
import signal

import torch
import torch.nn.functional as F
from torch import nn

import unisono
from unisono.callbacks import Callback
from unisono.data import digits


class KillOnce(Callback):
    """Kills worker 1 as the system does when memory is full. Its replacement lives."""

    is_replacement = False

    def on_begin(self, fit):
        self.is_replacement = fit.has_joined

    def on_step_end(self, fit, step):
        if fit.rank == 1 and step.number == 30 and not self.is_replacement:
            os.kill(os.getpid(), signal.SIGKILL)


def loss(model, batch):
    images, labels = batch
    return F.cross_entropy(model(images), labels)


def main():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.Dropout(0.2), nn.Linear(64, 10))
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    trainer = unisono.Trainer(model, optimizer, loss, shards=4, callbacks=[KillOnce()])
    trainer.fit(digits(), batch_size=32, epochs=20, validate=digits(train=False))


if __name__ == "__main__":
    main()
