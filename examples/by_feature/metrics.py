"""Compute a metric of scikit-learn over all rows of a data set, and hand a DataLoader to `fit`."""

import torch
import torch.nn.functional as F
from sklearn.metrics import balanced_accuracy_score, roc_auc_score
from torch import nn
from torch.utils.data import DataLoader

import unisono
from unisono.data import digits


def loss(model, batch):
    images, labels = batch
    return F.cross_entropy(model(images), labels)


METRICS = {
    # Called once, with the rows of the whole data set in its order.
    "auc": lambda logits, labels: roc_auc_score(labels, logits.softmax(1), multi_class="ovr"),
    "balanced": lambda logits, labels: balanced_accuracy_score(labels, logits.argmax(1)),
}


def main():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    trainer = unisono.Trainer(model, optimizer, loss, shards=4)
    loader = DataLoader(digits(), batch_size=64, shuffle=True)  # 64 samples of all workers together
    trainer.fit(loader, epochs=5, validate=digits(train=False), validate_metrics=METRICS)


if __name__ == "__main__":
    main()
