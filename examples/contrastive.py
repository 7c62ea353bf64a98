"""Learn features without labels by contrast (SimCLR): two views of an image belong together.

The loss compares every image of the global batch with every other one, however many workers there
are. Memory holds the graph of one shard at a time.

python contrastive.py              # one worker
unisono run -n 2 contrastive.py    # two workers, the same digest
"""

import torch
import torch.nn.functional as F
from torch import nn

import unisono
from unisono.data import digits

TEMPERATURE = 0.2


def view(images):
    """Shift each image by up to a pixel and add noise. Generators are seeded for each shard."""
    down, right = torch.randint(-1, 2, (2,)).tolist()
    return images.roll((down, right), (2, 3)) + 0.1 * torch.randn_like(images)


def embed(model, batch):
    """Return two views of each image of a shard, as rows of features."""
    images, _ = batch
    return tuple(F.normalize(model(view(images)), dim=1) for _ in range(2))


def contrast(model, features):
    """Find each view's other one among all views of the whole global batch (NT-Xent)."""
    views = torch.cat(features)
    logits = (views @ views.T / TEMPERATURE).fill_diagonal_(-torch.inf)  # never itself
    other = torch.arange(len(views), device=views.device).roll(len(views) // 2)
    found = (logits.argmax(1) == other).float().mean()
    return {"loss": F.cross_entropy(logits, other), "found": found}


def features(model, batch):
    """Leave out the last layer, which only the loss needs."""
    return F.normalize(model[:-1](batch[0]), dim=1)


def main():
    torch.manual_seed(0)
    model = nn.Sequential(
        *(nn.Flatten(), nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU()),
        nn.Linear(128, 32),
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    trainer = unisono.Trainer(model, optimizer, unisono.WholeBatch(embed, contrast), shards=4)
    train_set, test_set = digits(), digits(train=False)
    trainer.fit(train_set, batch_size=128, epochs=10, validate=test_set)

    # How good are the features? Row i is of image i, on every worker.
    known = trainer.predict(train_set, batch_size=256, forward=features)
    rows = trainer.predict(test_set, batch_size=256, forward=features)
    nearest = (rows @ known.T).argmax(1)
    right = (train_set.tensors[1][nearest] == test_set.tensors[1]).float().mean()
    if unisono.world().rank == 0:
        print(f"test images whose nearest neighbour is the same digit: {right:.2%}")


if __name__ == "__main__":
    main()
