"""Image regression on several devices: two images in, one number out, with everything around it.

    unisono run -n 2 examples/ddp/images.py

Both images show the same scene, the second one brighter; the model tells by how much. They are made
on the fly from their number, so that no rank downloads or shares anything.

The classic mistakes that it avoids:

* *Per-rank means averaged.* Losses are reduced as a sum and a count, and divided once. A mean of
  means is another number as soon as one batch or one rank is shorter.
* *Padding counted twice*: the samplers repeat no sample.
* *The batch size multiplied by the number of workers*: ``--batch-size`` is of all of them together.
* ``shuffle`` *with a sampler*: the sampler shuffles, and ``set_epoch`` tells it when.
* *The optimizer built before the move to the device*: first the move, then DDP, then Adam.
* *Every rank writing the file,* ``module.`` *in it, tensors of GPU 0 in it*: one rank writes the
  model itself, from the CPU.
"""

import argparse
import os
from datetime import datetime

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset

import unisono


class Pairs(Dataset):
    """Pairs of images of one scene, and how much brighter the second one is."""

    def __init__(self, num_pairs, side, first=0):
        self.num_pairs, self.side, self.first = num_pairs, side, first

    def __len__(self):
        return self.num_pairs

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(self.first + index)
        scene = torch.rand(1, self.side, self.side, generator=generator)
        brighter = torch.rand(1, generator=generator)
        noise = 0.05 * torch.randn(scene.shape, generator=generator)
        return scene, scene + brighter + noise, brighter


class Net(nn.Module):
    """Looks at both images with the same convolutions and compares what they show."""

    def __init__(self, width=16):
        super().__init__()
        self.look = nn.Sequential(
            nn.Conv2d(1, width, 5, stride=2),
            nn.ReLU(),
            nn.Conv2d(width, width, 3, stride=2),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
        )
        self.compare = nn.Sequential(nn.Linear(2 * width, width), nn.ReLU(), nn.Linear(width, 1))

    def forward(self, first, second):
        return self.compare(torch.cat([self.look(first), self.look(second)], dim=1))


def loader_of(dataset, per_rank, args, **options):
    """Return a sampler of this rank's samples and the loader that follows it."""
    sampler = unisono.distributed.DistributedSampler(dataset, seed=args.seed, **options)
    loader = DataLoader(
        dataset,
        batch_size=per_rank,
        sampler=sampler,
        num_workers=args.loader_workers,
        persistent_workers=args.loader_workers > 0,
        pin_memory=torch.cuda.is_available(),
    )
    return sampler, loader


def mean_over_all(loss_sum, count, device):
    """Divide the sum of all ranks by the count of all. Collective: every rank calls it."""
    totals = torch.tensor([loss_sum, count], dtype=torch.float64, device=device)
    dist.all_reduce(totals)
    return (totals[0] / totals[1]).item()


def run_epoch(model, loader, device, optimizer=None):
    """Train if there is an optimizer; return the exact mean loss over the samples of all ranks."""
    model.train(optimizer is not None)
    loss_sum, count = 0.0, 0
    with torch.set_grad_enabled(optimizer is not None):
        for batch in loader:
            first, second, brighter = (part.to(device, non_blocking=True) for part in batch)
            loss = F.l1_loss(model(first, second), brighter)
            if optimizer is not None:
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            loss_sum += loss.item() * len(brighter)
            count += len(brighter)
    return mean_over_all(loss_sum, count, device)


def save(model, path):
    """Write the weights from the CPU, by one rank, under the model's own names."""
    if dist.get_rank() == 0:
        torch.save({name: tensor.cpu() for name, tensor in model.state_dict().items()}, path)


def train(device, args):
    per_rank = args.batch_size // dist.get_world_size()
    train_set = Pairs(args.pairs, args.side)
    validation_set = Pairs(args.validation_pairs, args.side, first=args.pairs)
    # Training: equally many samples for every rank. Validation: each sample exactly once.
    train_sampler, train_loader = loader_of(train_set, per_rank, args, drop_last=True)
    _, validation_loader = loader_of(validation_set, per_rank, args, shuffle=False, exact=True)

    torch.manual_seed(args.seed)
    model = Net().to(device)
    device_ids = [device.index] if device.type == "cuda" else None
    replica = unisono.distributed.DistributedDataParallel(model, device_ids=device_ids)
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr, betas=(0.9, 0.95))
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.epochs, eta_min=1e-6)

    for epoch in range(args.epochs):
        train_sampler.set_epoch(epoch)
        lr = schedule.get_last_lr()[0]
        train_loss = run_epoch(replica, train_loader, device, optimizer)
        # The bare model: in it no rank waits for another, so their numbers of batches may differ.
        validation_loss = run_epoch(model, validation_loader, device)
        schedule.step()
        if dist.get_rank() == 0:
            print(
                f"{datetime.now():%Y-%m-%d %H:%M:%S}  epoch {epoch + 1:2}/{args.epochs}  "
                f"lr {lr:.2e}  train {train_loss:.6f}  validation {validation_loss:.6f}"
            )
    save(model, args.out)


def main():
    parser = argparse.ArgumentParser(description="Image regression with DDP.")
    parser.add_argument("--epochs", type=int, default=30)
    parser.add_argument("--batch-size", type=int, default=32, help="of all workers together")
    parser.add_argument("--lr", type=float, default=1e-2)
    parser.add_argument("--pairs", type=int, default=512, help="pairs to train on")
    parser.add_argument("--validation-pairs", type=int, default=129)
    parser.add_argument("--side", type=int, default=32, help="pixels along an edge")
    parser.add_argument("--loader-workers", type=int, default=2, help="processes that read ahead")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--no-tf32", action="store_true", help="full float32 products on a GPU")
    parser.add_argument("--no-cudnn-benchmark", action="store_true", help="do not try kernels")
    parser.add_argument("--out", default="images.pt", help="where the weights are written")
    args = parser.parse_args()

    is_gpu, here = torch.cuda.is_available(), unisono.world()
    if args.batch_size < 1 or args.batch_size % here.world_size:
        parser.error(f"--batch-size {args.batch_size} must divide among {here.world_size} workers")
    if not os.path.isdir(os.path.dirname(args.out) or "."):
        parser.error(f"--out {args.out} must be in a folder that exists: make it first")
    device = torch.device("cuda", here.local_rank) if is_gpu else torch.device("cpu")
    if is_gpu:
        torch.cuda.set_device(device)
    # Both are faster on a GPU and change the bits of the result; neither does anything on a CPU.
    torch.backends.cuda.matmul.allow_tf32 = not args.no_tf32
    torch.backends.cudnn.allow_tf32 = not args.no_tf32
    torch.backends.cudnn.benchmark = not args.no_cudnn_benchmark

    dist.init_process_group("nccl" if is_gpu else "unisono")
    try:
        train(device, args)
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
