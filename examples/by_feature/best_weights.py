"""Keep the weights that validated best, and stop when validations no longer improve."""

import argparse

import torch
import torch.nn.functional as F
from torch import nn

import unisono
from unisono.callbacks import BestCheckpoint, EarlyStopping
from unisono.data import digits


def loss(model, batch):
    images, labels = batch
    logits = model(images)
    accuracy = (logits.argmax(1) == labels).float().mean()
    return {"loss": F.cross_entropy(logits, labels), "accuracy": accuracy}


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--directory", default="runs/best_weights")
    directory = parser.parse_args().directory

    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    best = BestCheckpoint(monitor="accuracy", better="higher")
    trainer = unisono.Trainer(
        model,
        optimizer,
        loss,
        shards=4,
        directory=directory,
        callbacks=[best, EarlyStopping(patience=3, monitor="accuracy", better="higher")],
    )
    test_set = digits(train=False)
    trainer.fit(digits(), batch_size=32, epochs=30, validate=test_set)
    unisono.load_weights(f"{directory}/best.safetensors", model)  # the last weights are overwritten
    result = trainer.evaluate(test_set, batch_size=64)
    if unisono.world().rank == 0:
        print(f"best accuracy {best.best:.2%}, after step {best.step}")
        print(f"accuracy of the weights in {directory}/best.safetensors: {result['accuracy']:.2%}")


if __name__ == "__main__":
    main()
