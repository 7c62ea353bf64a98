"""Predict numbers, with k-fold cross-validation: the lower half of a digit from its upper half.

python regression.py              # one worker
unisono run -n 2 regression.py    # two workers, the same digests
"""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import unisono
from unisono.data import digits

FOLDS = 5


def loss(model, batch):
    inputs, targets = batch
    return F.mse_loss(model(inputs), targets)


def r2(outputs, targets):
    """Return the share of the variance that is explained. Called once, with all rows of a fold."""
    unexplained = (targets - outputs).square().sum()
    return (1 - unexplained / (targets - targets.mean(0)).square().sum()).item()


def train(fold, train_rows, test_rows):
    """Train a new model on the other folds; return how well it predicts this one."""
    mean, std = train_rows[0].mean(0), train_rows[0].std(0).clamp(min=1e-3)
    train_set, test_set = (TensorDataset((x - mean) / std, y) for x, y in (train_rows, test_rows))
    torch.manual_seed(fold)
    model = nn.Sequential(
        *(nn.Linear(32, 128), nn.ReLU(), nn.Dropout(0.1)),
        *(nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 32)),
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    # With `directory=f"runs/fold-{fold}"` a run that is stopped resumes in the fold where it was.
    trainer = unisono.Trainer(model, optimizer, loss, shards=4, seed=fold)
    trainer.fit(train_set, batch_size=64, epochs=10)
    return trainer.evaluate(test_set, batch_size=256, metrics={"r2": r2})["r2"]


def main():
    images, _ = digits().tensors
    inputs, targets = images[:, 0, :4].flatten(1), images[:, 0, 4:].flatten(1)
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    folds = order.chunk(FOLDS)
    scores = []
    for fold, test in enumerate(folds):
        rest = torch.cat(folds[:fold] + folds[fold + 1 :])
        rows = ((inputs[which], targets[which]) for which in (rest, test))
        scores.append(train(fold, *rows))
    if unisono.world().rank == 0:
        found = torch.tensor(scores)
        print(f"R² of {FOLDS} folds: {found.mean():.3f} ± {found.std():.3f}")


if __name__ == "__main__":
    main()
