"""Choose the order of samples: rare classes more often, with a sampler of torch or a function.

python examples/by_feature/sampling.py function
"""

import sys

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import Subset, WeightedRandomSampler

import unisono
from unisono.data import digits


def unbalanced():
    """Drop most of the digits 5 to 9."""
    dataset = digits()
    labels = dataset.tensors[1]
    kept = ((labels < 5) | (torch.arange(len(labels)) % 10 == 0)).nonzero().flatten()
    return Subset(dataset, kept.tolist()), labels[kept]


def loss(model, batch):
    images, labels = batch
    logits = model(images)
    is_rare = (labels >= 5).float().mean()
    return {"loss": F.cross_entropy(logits, labels), "rare": is_rare}


def main():
    dataset, labels = unbalanced()
    weights = 1.0 / labels.bincount()[labels]

    def order(epoch, seed):
        """Return the indices of an epoch; called with the same numbers on every worker."""
        draw = torch.Generator().manual_seed(seed + epoch)
        return torch.multinomial(weights, len(weights), replacement=True, generator=draw).tolist()

    sampler = WeightedRandomSampler(weights, len(weights))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    trainer = unisono.Trainer(model, optimizer, loss, shards=4)
    by_function = sys.argv[1:] == ["function"]
    summary = trainer.fit(
        dataset, batch_size=128, epochs=5, sampler=order if by_function else sampler
    )
    if unisono.world().rank == 0:
        share = (labels >= 5).float().mean().item()
        print(f"{share:.0%} of the samples are rare; of the last batch {summary.means['rare']:.0%}")


if __name__ == "__main__":
    main()
