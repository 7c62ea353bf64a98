"""Fine-tune in two phases: first the new head alone, then all layers, more slowly."""

import torch
import torch.nn.functional as F
from torch import nn

import unisono
from unisono.data import digits


def loss(model, batch):
    images, labels = batch
    return F.cross_entropy(model(images), labels)


def main():
    torch.manual_seed(0)
    body = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.BatchNorm1d(64), nn.ReLU())
    model = nn.Sequential(body, nn.Linear(64, 10))
    optimizer = torch.optim.SGD(
        [
            {"params": model[0].parameters(), "lr": 0.02},
            {"params": model[1].parameters(), "lr": 0.2},
        ],
        momentum=0.9,
    )
    trainer = unisono.Trainer(model, optimizer, loss, shards=4)
    before = model[0][1].weight.detach().clone()
    body.requires_grad_(False)
    trainer.fit(digits(), batch_size=64, epochs=2, validate=digits(train=False))
    frozen = torch.equal(model[0][1].weight, before)
    body.requires_grad_(True)
    trainer.fit(digits(), batch_size=64, epochs=4, validate=digits(train=False))  # 4 in total
    if unisono.world().rank == 0:
        print(f"the body stayed as it was in the first phase: {frozen}")
        print(f"and in the second: {torch.equal(model[0][1].weight, before)}")


if __name__ == "__main__":
    main()
