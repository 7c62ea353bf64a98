"""Evaluate and save an exponential moving average (EMA) of the weights."""

import tempfile

import torch
import torch.nn.functional as F
from torch import nn

import unisono
from unisono.callbacks import EMA
from unisono.data import digits


def loss(model, batch):
    images, labels = batch
    logits = model(images)
    accuracy = (logits.argmax(1) == labels).float().mean()
    return {"loss": F.cross_entropy(logits, labels), "accuracy": accuracy}


def main():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    ema = EMA(0.98)  # averaged after each step, and kept in checkpoints
    trainer = unisono.Trainer(model, optimizer, loss, shards=4, callbacks=[ema])
    trainer.fit(digits(), batch_size=16, epochs=5)

    averaged = ema.model(model)
    test_set = digits(train=False)
    last = trainer.evaluate(test_set, batch_size=64)
    mean = trainer.evaluate(test_set, batch_size=64, model=averaged)
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        trainer.save(f"{folder}/averaged.safetensors", model=averaged)
    if unisono.world().rank == 0:
        print(f"last weights:     loss {last['loss']:.4f}, accuracy {last['accuracy']:.2%}")
        print(f"averaged weights: loss {mean['loss']:.4f}, accuracy {mean['accuracy']:.2%}")


if __name__ == "__main__":
    main()
