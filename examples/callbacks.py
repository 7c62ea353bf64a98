"""Train on handwritten digits with callbacks: averaged weights, the best ones, an early end.

    python examples/callbacks.py
    unisono run -n 2 examples/callbacks.py

Both give the same digest, the same averaged weights and the same files in the run directory,
`runs/callbacks`. Whoever starts it again goes on from there: with nothing, if it has ended.
"""

import argparse

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import TensorDataset

import unisono
from unisono.callbacks import (
    EMA,
    BestCheckpoint,
    Callback,
    CSVLog,
    EarlyStopping,
    LearningRateMonitor,
    Throughput,
)


class Recent(Callback):
    """One of our own: says at the end of each epoch what the loss has been lately."""

    def __init__(self):
        self.recent = None

    def on_step_end(self, fit, step):
        loss = step.means["loss"]
        self.recent = loss if self.recent is None else 0.9 * self.recent + 0.1 * loss

    def on_epoch_end(self, fit):
        fit.say(f"epoch {fit.epoch}: loss lately {self.recent:.4f}")

    def state_dict(self):
        return {"recent": self.recent}

    def load_state_dict(self, state):
        self.recent = state["recent"]


def loss(model, batch):
    images, labels = batch
    logits = model(images)
    return {
        "loss": F.cross_entropy(logits, labels),
        "accuracy": (logits.argmax(1) == labels).float().mean(),
    }


def digits():
    """Split the 1,797 images: every fifth is for the test."""
    data = load_digits()
    images = torch.tensor(data.images, dtype=torch.float32) / 16
    labels = torch.tensor(data.target)
    is_test = torch.arange(len(images)) % 5 == 0
    return (
        TensorDataset(images[~is_test], labels[~is_test]),
        TensorDataset(images[is_test], labels[is_test]),
    )


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--directory", default="runs/callbacks")
    directory = parser.parse_args().directory

    torch.manual_seed(0)
    train_set, test_set = digits()
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=5, gamma=0.5)
    ema, best = EMA(0.98), BestCheckpoint(monitor="accuracy", better="higher")
    trainer = unisono.Trainer(
        model,
        optimizer,
        loss,
        seed=0,
        schedule=schedule,
        directory=directory,
        callbacks=[
            ema,
            best,
            EarlyStopping(patience=4),
            CSVLog(every="epoch"),
            LearningRateMonitor(),
            Throughput(),
            Recent(),
        ],
    )
    trainer.fit(train_set, batch_size=32, epochs=20, validate=test_set)
    averaged = ema.model(model)
    result = trainer.evaluate(test_set, batch_size=32, model=averaged)
    trainer.save(f"{directory}/averaged.safetensors", model=averaged)
    if unisono.world().rank == 0:
        print(f"best accuracy {best.best:.2%}, after step {best.step}, in best.safetensors")
        print(f"averaged weights: accuracy {result['accuracy']:.2%}")


if __name__ == "__main__":
    main()
