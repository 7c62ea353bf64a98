"""A model of two inputs, in batches that are dicts: `forward=` says what it is called with."""

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from sklearn.metrics import balanced_accuracy_score
from torch import nn

import unisono


class Halves(nn.Module):
    """Looks at the upper and at the lower half of an image."""

    def __init__(self):
        super().__init__()
        self.upper, self.lower = nn.Linear(32, 32), nn.Linear(32, 32)
        self.head = nn.Linear(64, 10)

    def forward(self, upper, lower):
        return self.head(torch.cat([self.upper(upper), self.lower(lower)], 1).relu())


def forward(model, batch):
    return model(batch["upper"], batch["lower"])


def loss(model, batch):
    return F.cross_entropy(forward(model, batch), batch["label"])


def measured(model, batch):
    """Give what metrics get: rows for each sample."""
    return forward(model, batch), batch["label"]


METRICS = {
    "balanced": lambda logits, labels: balanced_accuracy_score(labels, logits.argmax(1)),
}


def main():
    torch.manual_seed(0)
    digits = load_digits()
    images = torch.tensor(digits.data, dtype=torch.float32) / 16
    data = [
        {"upper": image[:32], "lower": image[32:], "label": int(label)}
        for image, label in zip(images, digits.target, strict=True)
    ]
    model = Halves()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    trainer = unisono.Trainer(model, optimizer, loss, shards=4)
    trainer.fit(
        data,
        batch_size=64,
        epochs=3,
        validate=data,
        validate_metrics=METRICS,
        validate_forward=measured,
    )
    rows = trainer.predict(data, batch_size=64, forward=forward)
    if unisono.world().rank == 0:
        print(f"predicted {len(rows)} rows; the first digit is a {rows[0].argmax().item()}")


if __name__ == "__main__":
    main()
