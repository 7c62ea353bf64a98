"""Train one of the comparison's models over a slow link; print what it has come to, as JSON.

unisono run -n 2 bench/slow_link_program.py gpt --how "PowerSGD(rank=4, groups=2)"
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset, Subset

import unisono
from bench.workloads import DATA, GPT, cnn, load_mnist, load_text

GPT_BATCH, MNIST_BATCH, SHARDS, TENTH = 16, 64, 2, 10


def gpt() -> nn.Module:
    """Two layers of width 128: 0.4 million parameters."""
    return GPT(dim=128, num_layers=2, num_heads=4)


def loss(model: nn.Module, batch: list[Tensor]) -> dict[str, Tensor]:
    """Mean cross entropy, and how often the likeliest class is right."""
    inputs, targets = batch
    outputs = model(inputs).flatten(0, -2)
    right = (outputs.argmax(1) == targets.flatten()).float().mean()
    return {"loss": F.cross_entropy(outputs, targets.flatten()), "accuracy": right}


def load(name: str, folder: Path) -> tuple[Dataset[Any], Dataset[Any], bool]:
    """Give what is trained on, what is tested on, and whether the data are real."""
    if name == "mnist":
        train_set, is_real = load_mnist(folder, 60_000)
        if not is_real:
            return train_set, Subset(train_set, range(1000)), False
        place = folder if any(folder.glob("t10k-images*")) else folder / "mnist"
        return train_set, unisono.data.mnist(place, train=False), True
    windows, is_real = load_text(folder, 0)
    first = len(windows) - len(windows) // TENTH
    return Subset(windows, range(first)), Subset(windows, range(first, len(windows))), is_real


def main() -> None:
    """Train and, unless only bytes are counted, test."""
    parser = argparse.ArgumentParser()
    parser.add_argument("model", choices=("mnist", "gpt"))
    parser.add_argument("--how", default="", help="an expression such as Bf16Gradients()")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--data", type=Path, default=DATA)
    parser.add_argument("--test", action="store_true")
    given = parser.parse_args()
    link = eval(given.how, {name: getattr(unisono, name) for name in KINDS}) if given.how else None
    torch.manual_seed(given.seed)
    model = cnn() if given.model == "mnist" else gpt()
    train_set, test_set, is_real = load(given.model, given.data)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    trainer = unisono.Trainer(
        model, optimizer, loss, shards=SHARDS, seed=given.seed, slow_link=link
    )
    batch_size = MNIST_BATCH if given.model == "mnist" else GPT_BATCH
    trainer.fit(train_set, batch_size=batch_size, steps=given.steps)
    found = trainer.evaluate(test_set, batch_size=256) if given.test else {}
    found |= {"digest": trainer.digest(), "is_real": is_real}
    found["gradient_bytes"] = sum(parameter.nbytes for parameter in model.parameters())
    if unisono.world().rank == 0:
        print(f"result {json.dumps(found)}", flush=True)


KINDS = ("Bf16Gradients", "PowerSGD", "DiLoCo")

if __name__ == "__main__":
    main()
