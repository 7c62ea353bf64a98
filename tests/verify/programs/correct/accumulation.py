"""DDP that accumulates four passes and averages in the last one, on a set that does not divide."""

import contextlib

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

ACCUMULATE = 4


def make_data():
    torch.manual_seed(0)
    x = torch.randn(150, 6)
    return TensorDataset(x, (x.sum(1, keepdim=True) > 0).float())


def train(model, loader, optimizer, sampler):
    for epoch in range(3):
        sampler.set_epoch(epoch)
        optimizer.zero_grad()
        for number, (x, y) in enumerate(loader):
            is_last = (number + 1) % ACCUMULATE == 0
            with contextlib.nullcontext() if is_last else model.no_sync():
                loss = nn.functional.binary_cross_entropy_with_logits(model(x), y)
                (loss / ACCUMULATE).backward()
            if is_last:
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()


def main():
    dist.init_process_group("gloo")
    data = make_data()
    model = DistributedDataParallel(nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 1)))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=4, sampler=sampler)
    train(model, loader, optimizer, sampler)
    dist.destroy_process_group()


main()
