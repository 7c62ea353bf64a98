"""Gradients averaged by hand, in a class; clipping after averaging; uneven validation."""

import argparse
import os
import random

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset, random_split


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(12, 24), nn.Tanh(), nn.Linear(24, 24), nn.Tanh())
        self.head = nn.Linear(24, 4)
        self.register_buffer("scale", torch.ones(1))

    def forward(self, x):
        return self.head(self.body(x)) * self.scale


class Trainer:
    def __init__(self, args):
        self.rank, self.world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        dist.init_process_group("gloo", rank=self.rank, world_size=self.world_size)
        torch.manual_seed(args.seed)
        np.random.seed(args.seed)
        random.seed(args.seed)
        x = torch.randn(130, 12)
        data = TensorDataset(x, x[:, :4].argmax(1))
        self.train_set, self.test_set = random_split(data, [100, 30])
        self.model = Net()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=args.lr)
        self.schedule = torch.optim.lr_scheduler.StepLR(self.optimizer, 5, 0.5)
        self.sampler = DistributedSampler(self.train_set, self.world_size, self.rank)
        self.loader = DataLoader(
            self.train_set, args.batch_size // self.world_size, sampler=self.sampler
        )
        self.epochs = args.epochs

    def average_gradients(self):
        for parameter in self.model.parameters():
            dist.all_reduce(parameter.grad)
            parameter.grad /= self.world_size

    def train_epoch(self, epoch):
        self.sampler.set_epoch(epoch)
        self.model.train()
        for x, y in self.loader:
            self.optimizer.zero_grad()
            loss = F.cross_entropy(self.model(x), y)
            loss.backward()
            self.average_gradients()
            nn.utils.clip_grad_norm_(self.model.parameters(), 0.5)
            self.optimizer.step()
            self.schedule.step()

    @torch.no_grad()
    def validate(self):
        self.model.eval()
        mine = range(self.rank, len(self.test_set), self.world_size)
        right = torch.zeros(1)
        for index in mine:
            x, y = self.test_set[index]
            right += self.model(x[None]).argmax(1) == y
        dist.all_reduce(right)
        return right.item() / len(self.test_set)

    def fit(self):
        for epoch in range(self.epochs):
            self.train_epoch(epoch)
            accuracy = self.validate()
            if self.rank == 0:
                print("epoch", epoch, "accuracy", accuracy)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--lr", type=float, default=1e-2)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=16)
    Trainer(parser.parse_args()).fit()
