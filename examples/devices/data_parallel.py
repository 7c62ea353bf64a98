"""PyTorch's DataParallel tutorial: a toy model, random data, and who sees how much of a batch.

    python examples/devices/data_parallel.py
    python examples/devices/data_parallel.py --devices cpu,cpu,cpu
    python examples/devices/data_parallel.py --devices sim:0,sim:1

The tutorial ends with the sizes of inputs and outputs. This program trains, too, and prints a hash
of the weights: with the same ``--shards`` it is the same on one, two and three devices of a kind.

The classic mistakes that it avoids:

* *The optimizer built before the move to the device*: move, wrap, and only then build it.
* *Another number of GPUs, another result*: ``shards`` says into how many chunks a batch is cut, so
  the number of devices does not.
* ``module.`` *in the file*: save ``model.module.state_dict()``, which loads anywhere.
"""

import argparse
import hashlib

import torch
import torch.nn.functional as F
from choosing import add_devices, devices_of
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import unisono

INPUT_SIZE, OUTPUT_SIZE = 5, 2


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(INPUT_SIZE, OUTPUT_SIZE)
        self.says = True

    def forward(self, x):
        output = self.fc(x)
        if self.says:
            print(f"    in the model: input {tuple(x.shape)} on {x.device}")
        return output


def hash_of(model):
    digest = hashlib.sha256()
    for tensor in model.state_dict().values():
        digest.update(tensor.cpu().numpy().tobytes())
    return digest.hexdigest()[:16]


def main():
    parser = argparse.ArgumentParser(description="PyTorch's DataParallel tutorial.")
    parser.add_argument("--shards", type=int, default=4, help="chunks of a batch (%(default)s)")
    parser.add_argument("--samples", type=int, default=100)
    parser.add_argument("--batch-size", type=int, default=30)
    parser.add_argument("--epochs", type=int, default=20)
    add_devices(parser)
    args = parser.parse_args()
    devices = devices_of(args)

    torch.manual_seed(0)
    points = torch.randn(args.samples, INPUT_SIZE)
    labels = (points.sum(1) > 0).long()
    loader = DataLoader(TensorDataset(points, labels), batch_size=args.batch_size, shuffle=True)

    module = Model().to(devices[0])
    model = unisono.DataParallel(module, device_ids=devices, shards=args.shards)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    print(f"a batch is cut into at most {model.shards} chunks, for {len(devices)} devices")

    for _ in range(args.epochs):
        loss_sum = 0.0
        for x, y in loader:
            output = model(x)
            if module.says:
                print(f"outside: input {tuple(x.shape)}, output {tuple(output.shape)}")
            loss = F.cross_entropy(output, y.to(output.device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            loss_sum += loss.item() * len(x)
        module.says = False  # an attribute of the module reaches all replicas
    print(f"after {args.epochs} epochs: loss {loss_sum / args.samples:.4f}")
    print(f"weights {hash_of(model.module)}")


if __name__ == "__main__":
    main()
