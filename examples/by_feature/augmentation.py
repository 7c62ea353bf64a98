"""Augment samples at random: the same on any number of workers and loader processes.

Generators are seeded before each sample, from (seed, epoch, index). So draw with torch, numpy or
`random` as usual. A generator of your own would not be seeded.
"""

import argparse

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset

import unisono
from unisono.data import digits


class Augmented(Dataset):
    """Shifts each image by up to a pixel and adds noise: each time another one."""

    def __init__(self, dataset):
        self.dataset = dataset

    def __len__(self):
        return len(self.dataset)

    def __getitem__(self, index):
        image, label = self.dataset[index]
        down, right = torch.randint(-1, 2, (2,)).tolist()
        image = image.roll((down, right), (1, 2))
        return image + 0.1 * torch.randn_like(image), label


def loss(model, batch):
    images, labels = batch
    return F.cross_entropy(model(images), labels)


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--loader-workers", type=int, default=0, help="processes that read ahead")
    loader_workers = parser.parse_args().loader_workers

    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    trainer = unisono.Trainer(model, optimizer, loss, shards=4, seed=0)
    loader = DataLoader(Augmented(digits()), 64, shuffle=True, num_workers=loader_workers)
    trainer.fit(loader, epochs=3, validate=digits(train=False))


if __name__ == "__main__":
    main()
