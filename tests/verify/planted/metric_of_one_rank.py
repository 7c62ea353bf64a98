"""Prints, on rank 0, a metric over rank 0's part of the data, as if it were of all."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


class Accuracy:
    def __init__(self):
        self.right = self.all = 0

    def update(self, outputs, labels):
        self.right += (outputs.argmax(1) == labels).sum().item()
        self.all += len(labels)

    def compute(self):
        return self.right / self.all


class Experiment:
    def __init__(self):
        torch.manual_seed(0)
        x = torch.randn(192, 8)
        y = (x.sum(1) > 0).long()
        train, test = TensorDataset(x[:128], y[:128]), TensorDataset(x[128:], y[128:])
        self.model = DistributedDataParallel(nn.Linear(8, 2))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.sampler = DistributedSampler(train, seed=1)
        self.train = DataLoader(train, batch_size=16, sampler=self.sampler)
        part = DistributedSampler(test, shuffle=False)
        self.test = DataLoader(test, batch_size=16, sampler=part)

    def run(self):
        for epoch in range(3):
            self.sampler.set_epoch(epoch)
            self.model.train()
            for x, y in self.train:
                self.optimizer.zero_grad()
                nn.functional.cross_entropy(self.model(x), y).backward()
                self.optimizer.step()
            self.model.eval()
            metric = Accuracy()
            with torch.no_grad():
                for x, y in self.test:
                    metric.update(self.model(x), y)
            if dist.get_rank() == 0:
                print("accuracy", metric.compute())


dist.init_process_group("gloo")
Experiment().run()
dist.destroy_process_group()
