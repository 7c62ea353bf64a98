"""Train a CNN on MNIST with a process per device, which the program spawns itself.

    python examples/ddp/mnist_spawn.py --data FOLDER
    python examples/ddp/mnist_spawn.py                  # without MNIST: made-up images

FOLDER holds the four original files (train-images-idx3-ubyte, …), packed with gzip or not.

The classic mistakes that it avoids:

* *Every rank downloading the data.* What must happen once happens in ``main``, before any worker.
* *A fixed port.* The workers meet in a file that only this run knows.
* ``module.`` *in the file* (and ``_orig_mod.``, of ``torch.compile``): what is saved is the model
  itself, not its wrapper, so that any program can load it.
* *Every rank writing the file*: one does.
* *Padding counted twice, per-rank means averaged*: each test sample counts once, and what is
  reduced over the ranks is two whole numbers, right answers and samples.
"""

import argparse
import os
import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import unisono
from unisono.data import mnist


class Net(nn.Sequential):
    """Two convolutions, pooled twice, and two linear layers: 421,642 parameters."""

    def __init__(self):
        super().__init__(
            nn.Conv2d(1, 32, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(32, 64, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(64 * 7 * 7, 128),
            nn.ReLU(),
            nn.Linear(128, 10),
        )


class Trainer:
    """Trains one replica; all of them together train one model."""

    def __init__(self, model, train_set, test_set, device, args):
        per_rank = args.batch_size // dist.get_world_size()
        # Training: equally many for every rank, so that all take part in every step.
        self.train_sampler = unisono.distributed.DistributedSampler(train_set, drop_last=True)
        self.train_loader = DataLoader(train_set, per_rank, sampler=self.train_sampler)
        # Testing: each sample exactly once, though one rank may then have more than another.
        test_sampler = unisono.distributed.DistributedSampler(test_set, shuffle=False, exact=True)
        self.test_loader = DataLoader(test_set, 500, sampler=test_sampler)

        self.device = device
        self.model = model.to(device)
        device_ids = [device.index] if device.type == "cuda" else None
        self.replica = unisono.distributed.DistributedDataParallel(
            self.model, device_ids=device_ids
        )
        if args.compile:
            self.replica = torch.compile(self.replica)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=1e-3)  # after the move

    def train(self, num_epochs):
        for epoch in range(num_epochs):
            self.train_sampler.set_epoch(epoch)  # another order in each epoch
            for images, labels in self.train_loader:
                self._step(images.to(self.device), labels.to(self.device))
            right, count = self.test()
            if dist.get_rank() == 0:
                print(f"epoch {epoch + 1}: {right} of {count} right, accuracy {right / count:.4f}")

    def _step(self, images, labels):
        self.optimizer.zero_grad()
        F.cross_entropy(self.replica(images), labels).backward()
        self.optimizer.step()

    @torch.no_grad()
    def test(self):
        """Count right answers and samples of all ranks. Collective: every rank calls it."""
        self.model.eval()
        counts = torch.zeros(2, dtype=torch.int64, device=self.device)
        for images, labels in self.test_loader:
            answers = self.model(images.to(self.device)).argmax(1)  # the bare model never waits
            counts[0] += (answers == labels.to(self.device)).sum()
            counts[1] += len(labels)
        self.model.train()
        dist.all_reduce(counts)
        return counts.tolist()

    def save(self, path):
        """Write the weights with the model's own names, from the CPU, by one rank."""
        if dist.get_rank() == 0:
            weights = {name: tensor.cpu() for name, tensor in self.model.state_dict().items()}
            torch.save(weights, path)


def made_up(num_samples, seed):
    """Make images that show their label: a bright square in one of ten places, and noise."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(10, (num_samples,), generator=generator)
    images = 0.5 * torch.rand(num_samples, 1, 28, 28, generator=generator)
    for image, label in zip(images, labels.tolist(), strict=True):
        row, column = 14 * (label // 5), 5 * (label % 5)
        image[0, row + 4 : row + 9, column + 1 : column + 5] += 0.5
    return TensorDataset(images, labels)


def load(folder):
    """Return the training set and the test set; the same on every rank."""
    if folder is None:
        return made_up(2000, seed=0), made_up(501, seed=1)
    return mnist(folder), mnist(folder, train=False)


def work(rank, world_size, rendezvous, args):
    """Be one worker."""
    is_gpu = torch.cuda.is_available()
    device = torch.device("cuda", rank) if is_gpu else torch.device("cpu")
    if is_gpu:
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // world_size))
    torch.set_float32_matmul_precision("high")
    torch.manual_seed(0)
    dist.init_process_group(
        "nccl" if is_gpu else "unisono",
        init_method=f"file://{rendezvous}",
        rank=rank,
        world_size=world_size,
    )
    try:
        trainer = Trainer(Net(), *load(args.data), device, args)
        trainer.train(args.epochs)
        trainer.save(args.out)
    finally:
        dist.destroy_process_group()


def main():
    parser = argparse.ArgumentParser(description="Train a CNN on MNIST, a process per device.")
    parser.add_argument("--data", metavar="FOLDER", help="MNIST's files; made-up images if absent")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=64, help="of all workers together")
    parser.add_argument("--workers", type=int, default=torch.cuda.device_count() or 2)
    parser.add_argument("--compile", action="store_true", help="use torch.compile")
    parser.add_argument("--out", default="mnist.pt", help="where the weights are written")
    args = parser.parse_args()
    if args.workers < 1 or args.batch_size < 1 or args.batch_size % args.workers:
        parser.error(f"--batch-size {args.batch_size} must divide among {args.workers} workers")
    if not os.path.isdir(os.path.dirname(args.out) or "."):
        parser.error(f"--out {args.out} must be in a folder that exists: make it first")

    # A download would come here: once, before there are workers.
    with tempfile.TemporaryDirectory() as folder:
        rendezvous = os.path.join(folder, "rendezvous")
        mp.spawn(work, args=(args.workers, rendezvous, args), nprocs=args.workers)


if __name__ == "__main__":
    main()
