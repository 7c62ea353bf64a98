"""Train in mixed precision: autocast to bfloat16, or to float16 with a scaled loss.

python examples/by_feature/mixed_precision.py --precision fp16
"""

import argparse

import torch
import torch.nn.functional as F
from torch import nn

import unisono
from unisono.data import digits


def loss(model, batch):
    images, labels = batch
    logits = model(images)  # called under autocast
    seen.add(logits.dtype)
    return F.cross_entropy(logits, labels)


seen = set()


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--precision", choices=["fp32", "bf16", "fp16"], default="bf16")
    precision = parser.parse_args().precision

    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    trainer = unisono.Trainer(model, optimizer, loss, shards=4, precision=precision)
    trainer.fit(digits(), batch_size=64, epochs=3, validate=digits(train=False))
    if unisono.world().rank == 0:
        (logits,) = seen
        print(f"logits are {logits}, weights are {model[1].weight.dtype}")


if __name__ == "__main__":
    main()
