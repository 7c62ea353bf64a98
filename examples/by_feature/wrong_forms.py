"""Forms that people write by habit: each is refused with what to write instead."""

import tempfile

import torch
from torch import nn
from torch.utils.data import TensorDataset

import unisono


def loss(model, batch):
    inputs, labels = batch
    return nn.functional.cross_entropy(model(inputs), labels)


def trainer(loss=loss, width=8, optimizer=torch.optim.Adam, **options):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, width), nn.Tanh(), nn.Linear(width, 2))
    return unisono.Trainer(model, optimizer(model.parameters()), loss, shards=2, **options)


def of_three(model, inputs, labels):
    return loss(model, (inputs, labels))


def main(folder):
    data = TensorDataset(torch.randn(16, 4), torch.arange(16) % 2)
    rows = [{"inputs": inputs, "label": label} for inputs, label in data]
    trainer(directory=folder).fit(data, batch_size=8, epochs=1)
    forms = {
        "a criterion as loss": lambda: trainer(nn.CrossEntropyLoss()),
        "a loss of three arguments": lambda: trainer(of_three),
        "another model": lambda: trainer(width=9, directory=folder).fit(
            data, batch_size=8, epochs=2
        ),
        "a closure and a scaler": lambda: trainer(optimizer=torch.optim.LBFGS, precision="fp16"),
        "batches that do not fit the model": lambda: trainer().predict(rows, batch_size=8),
    }
    for name, form in forms.items():
        try:
            form()
        except (TypeError, ValueError, unisono.errors.CheckpointError) as error:
            if unisono.world().rank == 0:
                print(f"{name}: {type(error).__name__}: {error}\n")


if __name__ == "__main__":
    # Where workers name different folders, all take rank 0's.
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        main(folder)
