"""Logistic regression on 100 × 10 random samples with ``nn.DataParallel``: threads, one process.

    python examples/ddp/logistic.py

The classic mistake that it avoids: *the optimizer built before the move to the device*. An
optimizer keeps the parameters that it is given; if ``.to(device)`` or a wrapper makes others later,
it goes on to update the old ones. Here: move, wrap, and only then build the optimizer.

Without a GPU ``nn.DataParallel`` is a silent pass-through: it computes with one device, which is
none. With GPUs it splits each batch over all of them and copies the model anew each time; the
other programs of this folder, with a process a device, are faster. ``unisono.DataParallel`` takes
its place, on CPUs too: see ``examples/devices/data_parallel.py``.
"""

import argparse

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def random_samples(num_samples, num_features):
    """Points on both sides of a random plane; the labels are 0 and 1."""
    points = torch.randn(num_samples, num_features)
    labels = (points @ torch.randn(num_features, 1) > 0).float()
    return TensorDataset(points, labels)


def train_one_epoch(model, optimizer, loader, device):
    """Return the mean loss over samples, not over batches: the last batch may be short."""
    loss_sum, count = 0.0, 0
    for points, labels in loader:
        points, labels = points.to(device), labels.to(device)
        loss = F.binary_cross_entropy_with_logits(model(points), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        loss_sum += loss.item() * len(points)
        count += len(points)
    return loss_sum / count


def accuracy(model, dataset, device):
    points, labels = dataset.tensors
    with torch.no_grad():
        predicted = (model(points.to(device)) > 0).float().cpu()
    return (predicted == labels).float().mean().item()


def main():
    parser = argparse.ArgumentParser(description="Logistic regression with nn.DataParallel.")
    parser.add_argument("--samples", type=int, default=100)
    parser.add_argument("--features", type=int, default=10)
    parser.add_argument("--batch-size", type=int, default=10)
    parser.add_argument("--epochs", type=int, default=20)
    args = parser.parse_args()

    torch.manual_seed(0)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dataset = random_samples(args.samples, args.features)
    loader = DataLoader(dataset, batch_size=args.batch_size, shuffle=True)

    model = nn.DataParallel(nn.Linear(args.features, 1).to(device))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)  # after the move: see above
    print(f"devices that nn.DataParallel splits a batch over: {len(model.device_ids)}")

    for epoch in range(args.epochs):
        loss = train_one_epoch(model, optimizer, loader, device)
        print(f"epoch {epoch + 1:2}/{args.epochs}  loss {loss:.4f}")
    print(f"accuracy {accuracy(model, dataset, device):.2%}")
    print("names in the file:", *model.module.state_dict())  # of the model itself: no `module.`


if __name__ == "__main__":
    main()
