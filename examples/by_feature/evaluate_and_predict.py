"""Evaluate with exact means, and predict with row i for sample i, also into a file.

The 360 test images are no multiple of the batch size or the number of workers. Each counts once.
"""

import tempfile

import torch
import torch.nn.functional as F
from torch import nn

import unisono
from unisono.data import digits


def loss(model, batch):
    images, labels = batch
    logits = model(images)
    accuracy = (logits.argmax(1) == labels).float().mean()
    return {"loss": F.cross_entropy(logits, labels), "accuracy": accuracy}


def main(folder):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    trainer = unisono.Trainer(model, optimizer, loss, shards=4)
    trainer.fit(digits(), batch_size=64, epochs=5)

    test_set = digits(train=False)
    result = trainer.evaluate(test_set, batch_size=100)
    rows = trainer.predict(test_set, batch_size=100)  # the same tensor on every worker
    right = (rows.argmax(1) == test_set.tensors[1]).sum().item()

    # For rows that are too many for memory: they are in the file, and read when you look at them.
    in_file = trainer.predict(test_set, batch_size=100, path=f"{folder}/rows.safetensors")
    if unisono.world().rank == 0:
        print(f"evaluate: accuracy {result['accuracy']:.6f}, loss {result['loss']:.6f}")
        print(f"predict:  {right} of {len(rows)} right: {right / len(rows):.6f}")
        print(f"the file has the same rows: {torch.equal(in_file, rows)}")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        main(folder)
