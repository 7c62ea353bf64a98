"""Change the learning rate: with each step, or when validations no longer improve.

python examples/by_feature/schedules.py plateau
"""

import argparse

import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, ReduceLROnPlateau, SequentialLR

import unisono
from unisono.data import digits

WARMUP, STEPS = 20, 200


def warmup(optimizer):
    rise = LinearLR(optimizer, 0.05, total_iters=WARMUP)
    fall = CosineAnnealingLR(optimizer, STEPS - WARMUP, eta_min=1e-5)
    rates = SequentialLR(optimizer, [rise, fall], milestones=[WARMUP])
    return unisono.Schedule(rates, every="step")


def plateau(optimizer):
    # It steps after each validation, with the mean that `monitor` names.
    rates = ReduceLROnPlateau(optimizer, mode="max", factor=0.3, patience=0)
    return unisono.Schedule(rates, monitor="accuracy")


def loss(model, batch):
    images, labels = batch
    logits = model(images)
    accuracy = (logits.argmax(1) == labels).float().mean()
    return {"loss": F.cross_entropy(logits, labels), "accuracy": accuracy}


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("schedule", nargs="?", choices=["warmup", "plateau"], default="warmup")
    make_schedule = {"warmup": warmup, "plateau": plateau}[parser.parse_args().schedule]

    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    schedule = make_schedule(optimizer)
    trainer = unisono.Trainer(model, optimizer, loss, shards=4, schedule=schedule)
    trainer.fit(digits(), batch_size=64, steps=STEPS, validate=digits(train=False))


if __name__ == "__main__":
    main()
