"""Models that are cut into stages, and what trains them; run as a script, it prints the digest.

``python models.py NAME`` trains as ``unisono run`` does; options as JSON come second.
"""

from __future__ import annotations

import json
import sys

import torch
import torch.nn.functional as F
from tests.stages.models import GPT, LENGTH, VOCABULARY, WIDTH, UNet
from torch import nn
from torch.utils.data import TensorDataset

import unisono

NUM_SAMPLES, BATCH_SIZE = 48, 16


class Images(nn.Module):
    """Convolutions with BatchNorm and dropout, partly in place. Final."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU())
        self.drop = nn.Dropout(0.2)
        self.body = nn.Sequential(
            nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(inplace=True)
        )
        self.head = nn.Sequential(nn.Dropout(0.3), nn.Flatten(), nn.Linear(8 * 64, 10))

    def forward(self, x):
        x = self.drop(self.stem(x))
        x = self.body(x) + x
        x += 1
        return self.head(x)


class Routed(nn.Module):
    """Noise, an average kept in a buffer, several outputs, a frozen layer, LSTM. Final."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(12, WIDTH)
        self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.lstm = nn.LSTM(WIDTH, WIDTH, num_layers=2, dropout=0.2, batch_first=True)
        self.last = nn.Linear(WIDTH, 4)

    def forward(self, x):
        h = torch.tanh(self.first(x + 0.1 * torch.randn_like(x)))
        h = self.frozen(h) + 0.1 * torch.randn(WIDTH)
        if self.training:
            self.mean = 0.9 * self.mean + 0.1 * h.detach().mean(0)
        out, _ = self.lstm((h - self.mean).view(len(x), 2, WIDTH // 2).repeat(1, 1, 2))
        return {"logits": self.last(out[:, -1]), "size": h.pow(2).mean()}


def images_loss(model, batch):
    """Mean over samples, with how many are right."""
    logits = model(batch[0])
    right = (logits.argmax(1) == batch[1]).float().mean()
    return {"loss": F.cross_entropy(logits, batch[1]), "right": right}


def gpt_loss(model, batch):
    """Sum over the tokens that count."""
    logits, targets = model(batch[0]), batch[1]
    counted = targets >= 3
    total = F.cross_entropy(logits[counted], targets[counted], reduction="sum")
    return total, counted.sum()


def unet_loss(model, batch):
    """Classify what noise is added to."""
    return F.cross_entropy(model(batch[0] + 0.1 * torch.randn_like(batch[0])), batch[1])


def routed_loss(model, batch):
    """A part of the loss comes from an early layer."""
    out = model(batch[0])
    return {
        "loss": F.cross_entropy(out["logits"], batch[1]) + 0.01 * out["size"],
        "size": out["size"],
    }


def make(name):
    """Give a model, its loss function and its samples."""
    torch.manual_seed(0)
    if name == "images":
        data = torch.randn(NUM_SAMPLES, 3, 8, 8), torch.randint(0, 10, (NUM_SAMPLES,))
        return Images(), images_loss, TensorDataset(*data)
    if name in ("gpt", "recomputed"):
        tokens = torch.randint(0, VOCABULARY, (2, NUM_SAMPLES, LENGTH))
        checkpoints = False if name == "recomputed" else None
        return GPT(4, checkpoints), gpt_loss, TensorDataset(*tokens)
    if name == "unet":
        images = torch.randn(NUM_SAMPLES, 1, 8, 8)
        return UNet(), unet_loss, TensorDataset(images, torch.randint(10, (NUM_SAMPLES,)))
    data = torch.randn(NUM_SAMPLES, 12), torch.randint(0, 4, (NUM_SAMPLES,))
    return Routed(), routed_loss, TensorDataset(*data)


NAMES = ("images", "gpt", "recomputed", "unet", "routed")


def train(name, *, epochs=2, kind="adam", shards=5, batch_size=BATCH_SIZE, **options):
    """Train; gives what must not depend on stages and workers."""
    model, loss, data = make(name)
    of_kind = {
        "adam": lambda: torch.optim.Adam(model.parameters(), 1e-2),
        "adafactor": lambda: torch.optim.Adafactor(model.parameters(), 1e-2),
    }
    optimizer = of_kind[kind]()
    balance = options.pop("balance", None)
    if balance is not None:
        options["balance"] = {int(stage): names for stage, names in balance.items()}
    trainer = unisono.Trainer(model, optimizer, loss, shards=shards, seed=3, **options)
    summary = trainer.fit(data, batch_size=batch_size, epochs=epochs, validate=data)
    digest, means = trainer.digest(), summary.means
    return {"digest": digest, "means": means, "validation": summary.validation}


if __name__ == "__main__":
    result = train(sys.argv[1], **json.loads(sys.argv[2] if len(sys.argv) > 2 else "{}"))
    if unisono.world().rank == 0:
        print("result: " + json.dumps(result))
