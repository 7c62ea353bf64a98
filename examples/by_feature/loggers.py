"""Send a run's numbers to Weights & Biases, MLflow, Trackio, TensorBoard; nothing is uploaded.

    python examples/by_feature/loggers.py
    unisono run -n 2 examples/by_feature/loggers.py --loggers csv wandb mlflow

Each needs its extra, such as `pip install 'unisono[wandb]'`. In `runs/loggers` each has a folder.
"""

import argparse

import torch
from torch import nn

import unisono
from unisono.callbacks import CSVLog, MLflow, TensorBoard, Trackio, WandB
from unisono.data import digits


def loss(model, batch):
    images, labels = batch
    logits = model(images)
    accuracy = (logits.argmax(1) == labels).float().mean()
    return {"loss": nn.functional.cross_entropy(logits, labels), "accuracy": accuracy}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--directory", default="runs/loggers")
    parser.add_argument("--loggers", nargs="*", default=["csv"])
    parser.add_argument("--hidden", type=int, default=64)
    args = parser.parse_args()

    # Batch size, seed and the optimizer's settings are logged without being named here.
    hyperparameters = {"hidden": args.hidden}
    loggers = {
        "csv": CSVLog,
        "tensorboard": TensorBoard,
        "wandb": lambda: WandB("digits", config=hyperparameters),  # mode="online" uploads
        "mlflow": lambda: MLflow("digits", config=hyperparameters),
        "trackio": lambda: Trackio("digits", config=hyperparameters),
    }

    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Flatten(), nn.Linear(64, args.hidden), nn.ReLU(), nn.Linear(args.hidden, 10)
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    trainer = unisono.Trainer(
        model,
        optimizer,
        loss,
        shards=4,
        directory=args.directory,
        callbacks=[loggers[name]() for name in args.loggers],
    )
    trainer.fit(digits(), batch_size=64, epochs=2)


if __name__ == "__main__":
    main()
