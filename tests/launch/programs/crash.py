"""A program that crashes in training: how is the first argument; with what the second says."""

import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler

import unisono

WAY, KIND = sys.argv[1:3]
RANK, SIZE = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
BAD = 10  # the sample that rank 1 meets in its second step or so


def crash(way):
    if way == "raise":
        raise ArithmeticError("the original")
    if way == "kill":
        os.kill(os.getpid(), 9)
    if way == "bus":
        os.kill(os.getpid(), 7)
    if way == "vanish":
        os._exit(0)


class Images(Dataset):
    def __len__(self):
        return 32

    def __getitem__(self, index):
        if WAY.startswith("load ") and index >= BAD and RANK == 1:
            crash(WAY.removeprefix("load "))
        return torch.full((4,), 1e-3 * index), torch.tensor(index)


class Backward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        crash("raise")


def loss_of(model, batch):
    images, numbers = batch
    is_bad = RANK == 1 and bool((numbers >= BAD).any())
    if WAY.startswith("forward ") and is_bad:
        crash(WAY.removeprefix("forward "))
    out = model(images)
    if WAY == "backward" and is_bad:
        out = Backward.apply(out)
    return out.square().mean()


def train_ddp(model, optimizer):
    dist.init_process_group("gloo")
    model = DistributedDataParallel(model)
    data = Images()
    sampler = DistributedSampler(data, shuffle=False)
    for batch in DataLoader(data, 4, sampler=sampler, num_workers=2 * ("loader" in sys.argv)):
        loss_of(model, batch).backward()
        optimizer.step()
        optimizer.zero_grad()
    dist.destroy_process_group()


def main():
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    if KIND == "ddp":
        train_ddp(model, optimizer)
        return
    trainer = unisono.Trainer(model, optimizer, loss_of, shards=2, seed=0)
    loaders = 2 * ("loader" in sys.argv)
    trainer.fit(DataLoader(Images(), 8, shuffle=True, num_workers=loaders), epochs=1)


if __name__ == "__main__":
    main()
