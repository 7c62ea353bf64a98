"""Save weights and load them elsewhere: safetensors, and files of torch and of DDP programs."""

import tempfile
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import nn

import unisono
from unisono.data import digits


def loss(model, batch):
    images, labels = batch
    return F.cross_entropy(model(images), labels)


def build():
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))


def main(folder):
    torch.manual_seed(0)
    model = build()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    trainer = unisono.Trainer(model, optimizer, loss, shards=4)
    trainer.fit(digits(), batch_size=64, epochs=2)

    trainer.save(folder / "ours.safetensors")  # one worker writes, all return when it is there
    if unisono.world().rank > 0:
        return
    print("names in the file:", *load_file(folder / "ours.safetensors"))

    weights = model.state_dict()
    torch.save(weights, folder / "plain.pt")
    torch.save({f"module.{name}": value for name, value in weights.items()}, folder / "ddp.pt")
    for name in ("ours.safetensors", "plain.pt", "ddp.pt"):
        other = build()
        unisono.load_weights(folder / name, other)
        is_same = all(map(torch.equal, other.parameters(), model.parameters()))
        print(f"{name}: {'the same weights' if is_same else 'OTHER WEIGHTS'}")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        main(Path(folder))
