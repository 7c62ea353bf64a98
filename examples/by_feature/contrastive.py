"""Learn features of digits by contrast: two noisy views of an image belong together.

The loss compares every image of the global batch with every other one, however many workers there
are; memory holds the graph of one shard at a time.
"""

import torch
import torch.nn.functional as F
from torch import nn

import unisono
from unisono.data import digits


def embed(model, batch):
    """Give two views of each image, as rows of features."""
    images, _ = batch
    views = [images + 0.3 * torch.randn_like(images) for _ in range(2)]
    return tuple(F.normalize(model(view), dim=1) for view in views)


def contrast(model, features):
    """Find each image's other view among all of the global batch (SimCLR, Chen et al. 2020)."""
    first, second = features
    logits = first @ second.T / 0.2
    own = torch.arange(len(logits), device=logits.device)
    return {
        "loss": (F.cross_entropy(logits, own) + F.cross_entropy(logits.T, own)) / 2,
        "found": (logits.argmax(1) == own).float().mean(),
    }


def main():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 32))
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    loss = unisono.WholeBatch(embed, contrast)
    trainer = unisono.Trainer(model, optimizer, loss, shards=4)
    trainer.fit(digits(), batch_size=128, epochs=5, validate=digits(train=False))


if __name__ == "__main__":
    main()
