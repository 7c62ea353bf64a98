"""Send less between hosts: compare the ways, on one host that computes what two would."""

import torch
import torch.nn.functional as F
from torch import nn

import unisono
from unisono.data import digits

WAYS = (
    None,  # exact
    unisono.Bf16Gradients(groups=2),  # leave `groups` out on two hosts: it is their number
    unisono.PowerSGD(rank=4, start_step=20, groups=2),
    unisono.DiLoCo(local_steps=10, groups=2),
)


def loss(model, batch):
    images, labels = batch
    return F.cross_entropy(model(images), labels)


def main():
    for way in WAYS:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
        optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
        trainer = unisono.Trainer(model, optimizer, loss, shards=4, slow_link=way)
        trainer.fit(digits(), batch_size=64, steps=140)
        found = trainer.evaluate(digits(train=False), batch_size=256)
        if unisono.world().rank == 0:
            print(f"{way or 'exact'}: loss {found['loss']:.4f}")


if __name__ == "__main__":
    main()
