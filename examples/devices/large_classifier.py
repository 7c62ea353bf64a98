"""A classifier whose last layer does not fit on one device, as for faces, products or words.

    python examples/devices/large_classifier.py --devices sim:0,sim:1 --limit-mb 40
    python examples/devices/large_classifier.py --devices sim:0 --limit-mb 40   # does not fit
    python examples/devices/large_classifier.py                                 # without a limit

With 100,000 classes the last layer has more weights than all others together, and Adam keeps two
more numbers for each. So it is written as several layers, each with a range of the classes, and
``unisono.split`` puts these on the devices. Simulated devices have a limit of memory, which shows
that the whole would not fit.

The classic mistake that it avoids: *copying the whole model to every device*. ``DataParallel`` and
DDP need a device that takes all of it.
"""

import argparse

import torch
import torch.nn.functional as F
from choosing import add_devices, devices_of, simulator
from torch import nn

import unisono

MB = 2**20


class Classifier(nn.Module):
    """Features (batch, width) → logits (batch, classes)."""

    def __init__(self, width, num_classes, num_ranges):
        super().__init__()
        self.features = nn.Sequential(nn.Linear(width, width), nn.ReLU())
        self.ranges = nn.ModuleList(
            nn.Linear(width, num_classes // num_ranges) for _ in range(num_ranges)
        )

    def forward(self, x):
        x = self.features(x)
        return torch.cat([of_range(x) for of_range in self.ranges], 1)


def main():
    parser = argparse.ArgumentParser(description="A last layer that needs several devices.")
    parser.add_argument("--classes", type=int, default=100_000)
    parser.add_argument("--width", type=int, default=32)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--limit-mb", type=int, help="memory of each simulated device, in MiB")
    add_devices(parser)
    args = parser.parse_args()
    devices = devices_of(args)
    if args.limit_mb:
        if not all(name.startswith("sim:") for name in devices):
            raise SystemExit("only simulated devices have limits: pass `--devices sim:0,sim:1`.")
        for name in devices:
            simulator().limit(int(name.removeprefix("sim:")), args.limit_mb * MB)

    torch.manual_seed(0)
    whole = Classifier(args.width, args.classes, num_ranges=4)
    num_bytes = sum(parameter.nbytes for parameter in whole.parameters())
    print(f"weights, gradients and Adam's state take {4 * num_bytes / MB:.0f} MiB")
    try:
        train(unisono.split(whole, devices), devices, args)
    except torch.OutOfMemoryError as error:
        raise SystemExit(f"it does not fit on {', '.join(devices)}: {error}") from error


def train(model, devices, args):
    # One parameter after the other: updates of all at once need memory for all at once.
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2, foreach=False)
    inputs, labels = torch.randn(4, args.width), torch.randint(args.classes, (4,))
    for step in range(args.steps):
        logits = model(inputs.to(devices[0]))
        loss = F.cross_entropy(logits, labels.to(logits.device))
        optimizer.zero_grad()
        with torch.autograd.set_multithreading_enabled(False):
            loss.backward()
        optimizer.step()
        print(f"step {step + 1}: loss {loss.item():.4f}")
    for device in dict.fromkeys(devices):
        here = [name for name, each in model.named_parameters() if str(each.device) == device]
        print(f"{device} has {', '.join(here)}")


if __name__ == "__main__":
    main()
