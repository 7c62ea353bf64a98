"""A DDP program over gloo as tutorials write it, that gets stuck: how is the first argument."""

import os
import sys
import threading
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler

sys.path.insert(0, os.path.dirname(__file__))
import ways

WAY = sys.argv[1]
RANK, SIZE = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
LATE = SIZE - 1


class Images(Dataset):
    def __len__(self):
        return 24

    def __getitem__(self, index):
        return load_image(index)


def load_image(index):
    if RANK == LATE and index >= 12 and WAY in ways.WAYS:
        ways.WAYS[WAY](index)
    return torch.full((4,), float(index)), torch.zeros(1)


def connect(seconds):
    ways.begin()
    time.sleep(seconds)


def evaluate(model):
    ways.begin()
    while True:
        model.module(torch.ones(64, 4)).sum()


def total(value):
    tensor = torch.full((value,), 1.0)
    dist.all_reduce(tensor)
    return tensor


def train():
    torch.set_num_threads(1)
    if WAY == "init" and RANK == LATE:
        connect(1000)
    dist.init_process_group("gloo")
    model = DistributedDataParallel(nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-5)
    data = Images()
    loaders = 1 if WAY == "lock" else 0
    if WAY == "lock" and RANK == LATE:
        ways.LOCK.acquire()
    loader = DataLoader(
        data, 2, sampler=DistributedSampler(data, shuffle=False), num_workers=loaders
    )
    for step, (images, labels) in enumerate(loader):
        if WAY == "leaves early" and RANK == LATE and step == 2:
            ways.begin()
            threading.Thread(target=time.sleep, args=(1000,)).start()
            return
        if WAY == "batches" and RANK == LATE and step == 3:
            ways.begin()
            break
        nn.functional.mse_loss(model(images), labels).backward()
        optimizer.step()
        optimizer.zero_grad()
        if WAY == "barrier" and RANK == 0 and step == 2:
            ways.begin()
            dist.barrier()  # alone
        if WAY == "collectives" and step == 2:
            ways.begin()
            if RANK == 0:
                total(4)
            else:
                dist.broadcast(torch.ones(2, 3, dtype=torch.float64), src=0)
        if WAY == "async" and step == 2:
            if RANK == LATE:
                ways.sleep_long(0)
            work = dist.all_reduce(torch.ones(3), async_op=True)
            work.wait()
    if WAY == "evaluates alone" and RANK == 0:
        evaluate(model)
    dist.barrier()  # at the end
    dist.destroy_process_group()


train()
