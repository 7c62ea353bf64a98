"""Find a processor that computes wrong bits: worker 1 does, on purpose, from step 30 on.

python examples/by_feature/audits.py              # one worker: nobody is wrong
unisono run -n 3 examples/by_feature/audits.py    # two others agree against worker 1
"""

import os

import torch
import torch.nn.functional as F
from torch import nn

import unisono
from unisono.data import digits


def loss(model, batch):
    images, labels = batch
    return F.cross_entropy(model(images), labels)


def main():
    if unisono.world().world_size > 1:
        os.environ.setdefault("UNISONO_FAULTS", "defect:rank=1,step=30")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    trainer = unisono.Trainer(model, optimizer, loss, shards=6, audit_every=20)
    trainer.fit(digits(), batch_size=64, epochs=4, validate=digits(train=False))


if __name__ == "__main__":
    main()
