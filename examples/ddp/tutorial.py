"""torch's DDP tutorial: a step, a checkpoint, and a model that spans two devices.

    unisono run -n 2 examples/ddp/tutorial.py

On GPUs each worker takes two of them, for the last part. On a CPU "both devices" are the CPU.

The classic mistakes that it avoids:

* *Every rank writing the file*: one writes, all wait for it, and then all read.
* ``module.`` *in the file*: the model is saved, not DDP's wrapper, and the file loads anywhere.
* *The optimizer built before the move to the device*: move, wrap, and only then build it.
* *Fixed ports*: whoever starts the workers says where they meet.
"""

import os
from contextlib import contextmanager, nullcontext
from tempfile import TemporaryDirectory

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import unisono


class Toy(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(10, 10), nn.Linear(10, 5)

    def forward(self, x):
        return self.second(F.relu(self.first(x)))


class ToyOnTwo(nn.Module):
    """The same model with a device for each layer; activations travel from one to the other."""

    def __init__(self, device_0, device_1):
        super().__init__()
        self.device_0, self.device_1 = device_0, device_1
        self.first, self.second = nn.Linear(10, 10).to(device_0), nn.Linear(10, 5).to(device_1)

    def forward(self, x):
        x = F.relu(self.first(x.to(self.device_0)))
        return self.second(x.to(self.device_1))


def wrap(model, device):
    """Move a model to its device and make it a replica."""
    return unisono.distributed.DistributedDataParallel(
        model.to(device), device_ids=[device.index] if device.type == "cuda" else None
    )


def train(model, num_steps=5):
    """Train on samples of this rank's own; return the losses of all ranks, first and last.

    Collective: every rank calls it.
    """
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    generator = torch.Generator().manual_seed(dist.get_rank())
    inputs = torch.randn(20, 10, generator=generator)
    targets = torch.randn(20, 5, generator=generator)
    losses = []
    for _ in range(num_steps):
        outputs = model(inputs)
        loss = F.mse_loss(outputs, targets.to(outputs.device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    ends = torch.stack([losses[0], losses[-1]]).to(next(model.parameters()).device)
    dist.all_reduce(ends)  # every rank has equally many samples, or we would need their counts
    return (ends / dist.get_world_size()).tolist()


def basic(device):
    torch.manual_seed(0)
    model = wrap(Toy(), device)
    first, last = train(model)
    say(f"basic: loss {first:.4f} → {last:.4f}, {all_have_the_same(model)}")


def checkpoint(device):
    torch.manual_seed(0)
    model = wrap(Toy(), device)
    train(model)
    with one_folder_for_all() as folder:
        path = os.path.join(folder, "model.pt")
        if dist.get_rank() == 0:
            torch.save(model.module.state_dict(), path)
        dist.barrier()  # nobody reads what is not written yet
        weights = torch.load(path, map_location=device, weights_only=True)
        dist.barrier()  # nobody removes what others still read
    torch.manual_seed(1)
    fresh = wrap(Toy(), device)
    fresh.module.load_state_dict(weights)
    first, last = train(fresh)
    say(f"checkpoint: {' '.join(weights)}")
    say(f"checkpoint: goes on, loss {first:.4f} → {last:.4f}, {all_have_the_same(fresh)}")


def two_devices(device_0, device_1):
    torch.manual_seed(0)
    # No `device_ids`: the model knows its devices.
    model = unisono.distributed.DistributedDataParallel(ToyOnTwo(device_0, device_1))
    first, last = train(model)
    say(
        f"two devices, {device_0} and {device_1}: loss {first:.4f} → {last:.4f}, "
        f"{all_have_the_same(model)}"
    )


@contextmanager
def one_folder_for_all():
    """A folder that rank 0 makes and removes. Collective: every rank calls it."""
    with TemporaryDirectory() if dist.get_rank() == 0 else nullcontext() as own:
        names = [own]
        dist.broadcast_object_list(names)
        yield names[0]


def all_have_the_same(model):
    """Compare all parameters of all ranks. Collective: every rank calls it."""
    own = torch.cat([parameter.detach().flatten().cpu() for parameter in model.parameters()])
    everybodys = [None] * dist.get_world_size()
    dist.all_gather_object(everybodys, own)
    is_same = all(torch.equal(own, other) for other in everybodys)
    return "the same weights on every rank" if is_same else "DIFFERENT WEIGHTS"


def say(line):
    if dist.get_rank() == 0:
        print(line)


def main():
    local_rank, num_gpus = unisono.world().local_rank, torch.cuda.device_count()
    device_0 = device_1 = torch.device("cpu")
    if num_gpus:
        if num_gpus < 2 * unisono.world().local_world_size:
            raise SystemExit(f"two GPUs per worker are needed, but there are {num_gpus} in all")
        device_0 = torch.device("cuda", 2 * local_rank)
        device_1 = torch.device("cuda", 2 * local_rank + 1)
        torch.cuda.set_device(device_0)
    dist.init_process_group("nccl" if num_gpus else "unisono")
    try:
        basic(device_0)
        checkpoint(device_0)
        two_devices(device_0, device_1)
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
