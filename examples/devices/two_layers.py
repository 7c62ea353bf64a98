"""PyTorch's model parallel tutorial: a model of two layers, each on a device of its own.

    python examples/devices/two_layers.py
    python examples/devices/two_layers.py --devices sim:0,sim:1

The tutorial writes ``.to("cuda:0")`` and ``.to("cuda:1")`` into the model. Here the model is as it
would be for one device, and ``unisono.split`` puts its parts on the devices. It trains to the same
bits as on one device, which the program checks, and its state dict loads everywhere.

The classic mistakes that it avoids:

* *Targets on the wrong device*: they go where the outputs are.
* *Devices written into the model*: it could not be loaded where there is one device.
"""

import argparse

import torch
import torch.nn.functional as F
from choosing import add_devices, devices_of
from torch import nn

import unisono


class ToyModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.net1, self.net2 = nn.Linear(10, 10), nn.Linear(10, 5)

    def forward(self, x):
        return self.net2(F.relu(self.net1(x)))


def train(devices, steps):
    """Train on random data; return the model."""
    torch.manual_seed(0)
    model = unisono.split(ToyModel(), devices)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for step in range(steps):
        inputs, targets = torch.randn(20, 10), torch.randn(20, 5)
        outputs = model(inputs.to(devices[0]))
        loss = F.mse_loss(outputs, targets.to(outputs.device))
        optimizer.zero_grad()
        with torch.autograd.set_multithreading_enabled(False):  # else devices race each other
            loss.backward()
        optimizer.step()
        if step in (0, steps - 1):
            print(f"step {step + 1:3}: loss {loss.item():.4f}")
    return model


def main():
    parser = argparse.ArgumentParser(description="Two layers on two devices.")
    parser.add_argument("--steps", type=int, default=100)
    add_devices(parser)
    args = parser.parse_args()
    devices = devices_of(args)

    model = train(devices, args.steps)
    for name, parameter in model.named_parameters():
        print(f"{name:12} on {parameter.device}")
    print(f"the same on {devices[0]} alone:")
    whole = train(devices[:1], args.steps)
    one, other = ([*each.cpu().parameters()] for each in (unisono.split(model, ["cpu"]), whole))
    is_same = all(map(torch.equal, one, other))
    print("the same bits" if is_same else "OTHER BITS")


if __name__ == "__main__":
    main()
