"""Train a small CNN on handwritten digits. Put your own model, loss and data in its place.

python classifier.py              # one worker
unisono run -n 2 classifier.py    # two workers, the same digest: the weights agree bit for bit
"""

import torch
import torch.nn.functional as F
from torch import nn

import unisono


class Net(nn.Sequential):
    """The model: any nn.Module. It knows nothing of workers or devices."""

    def __init__(self):
        super().__init__(
            nn.Conv2d(1, 32, 3, padding=1),
            nn.BatchNorm2d(32),
            nn.ReLU(),
            nn.Conv2d(32, 64, 3, padding=1),
            nn.BatchNorm2d(64),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(64 * 4 * 4, 64),
            nn.ReLU(),
            nn.Linear(64, 10),
        )


def loss(model, batch):
    """Return the mean loss over `batch`. Further entries of the dict are averaged and shown."""
    images, labels = batch
    logits = model(images)
    return {
        "loss": F.cross_entropy(logits, labels),
        "accuracy": (logits.argmax(1) == labels).float().mean(),
    }


def main():
    torch.manual_seed(0)  # for the initial weights; `seed=` below is for everything after
    train_set = unisono.data.digits()  # any torch Dataset, or a DataLoader
    test_set = unisono.data.digits(train=False)
    model = Net()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    trainer = unisono.Trainer(
        model,
        optimizer,
        loss,
        shards=4,  # parts of each batch; at most this many workers share the work
        seed=0,
        # directory="runs/digits", checkpoint="10min",  # stop at any time and resume
    )
    # `batch_size` is the whole batch, however many workers share it.
    trainer.fit(train_set, batch_size=32, epochs=6, validate=test_set)
    result = trainer.evaluate(test_set, batch_size=32)
    if unisono.world().rank == 0:  # every worker runs this program
        print(f"test accuracy {result['accuracy']:.2%}")
    # trainer.save("model.safetensors")
    return trainer.digest()  # of weights and optimizer state; `unisono demo` compares it


if __name__ == "__main__":
    main()
