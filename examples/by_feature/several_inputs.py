"""A model of two inputs, in batches that are dicts: `forward=` says what it is called with."""

import torch
import torch.nn.functional as F
from sklearn.metrics import balanced_accuracy_score
from torch import nn

import unisono
from unisono.data import digits


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


def balanced(logits, labels):
    return balanced_accuracy_score(labels, logits.argmax(1))


def main():
    torch.manual_seed(0)
    data = [
        {"upper": image[0, :4].flatten(), "lower": image[0, 4:].flatten(), "label": label}
        for image, label in digits()
    ]
    model = Halves()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    trainer = unisono.Trainer(model, optimizer, loss, shards=4)
    trainer.fit(
        data,
        batch_size=64,
        epochs=3,
        validate=data,
        validate_metrics={"balanced": balanced},
        validate_forward=lambda model, batch: (forward(model, batch), batch["label"]),
    )
    rows = trainer.predict(data, batch_size=64, forward=forward)
    if unisono.world().rank == 0:
        print(f"predicted {len(rows)} rows; the first digit is a {rows[0].argmax().item()}")


if __name__ == "__main__":
    main()
