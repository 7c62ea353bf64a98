"""Learn features without labels from a target network (BYOL), a moving average of the trained one.

python byol.py              # one worker
unisono run -n 2 byol.py    # two workers, the same digest
"""

import copy

import torch
import torch.nn.functional as F
from torch import nn

import unisono
from unisono.callbacks import Callback
from unisono.data import digits


def mlp(num_in, num_out):
    return nn.Sequential(
        *(nn.Linear(num_in, 128), nn.BatchNorm1d(128), nn.ReLU(), nn.Linear(128, num_out))
    )


class BYOL(nn.Module):
    """Predicts the target network's features of one view from the online network's of another."""

    def __init__(self):
        super().__init__()
        self.online, self.predictor = mlp(64, 32), mlp(32, 32)
        self.target = copy.deepcopy(self.online).requires_grad_(False)

    def forward(self, one, other):
        predicted = F.normalize(self.predictor(self.online(one)), dim=1)
        return 2 - 2 * (predicted * F.normalize(self.target(other), dim=1)).sum(1).mean()


class MovingAverage(Callback):
    """Moves the target after each step: every worker does the same, and it is done once."""

    def on_step_end(self, fit, step):
        online = dict(fit.model.online.named_parameters())
        for name, target in fit.model.target.named_parameters():
            target.data.lerp_(online[name].data, 0.02)


def view(images):
    """Shift the images by up to a pixel and add noise. Generators are seeded for each shard."""
    down, right = torch.randint(-1, 2, (2,)).tolist()
    return (images.roll((down, right), (2, 3)) + 0.2 * torch.randn_like(images)).flatten(1)


def features(model, batch):
    return F.normalize(model.online(batch[0].flatten(1)), dim=1)


def loss(model, batch):
    one, other = view(batch[0]), view(batch[0])
    return (model(one, other) + model(other, one)) / 2


def main():
    torch.manual_seed(0)
    model = BYOL()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    trainer = unisono.Trainer(model, optimizer, loss, shards=4, callbacks=[MovingAverage()])
    train_set, test_set = digits(), digits(train=False)
    # A short last batch is left out: BatchNorm needs samples in every shard.
    trainer.fit(train_set, batch_size=128, epochs=20, drop_last=True)

    known = trainer.predict(train_set, batch_size=256, forward=features)
    rows = trainer.predict(test_set, batch_size=256, forward=features)
    nearest = (rows @ known.T).argmax(1)
    right = (train_set.tensors[1][nearest] == test_set.tensors[1]).float().mean()
    if unisono.world().rank == 0:
        print(f"test images whose nearest neighbour is the same digit: {right:.2%}")


if __name__ == "__main__":
    main()
