"""Trains for longer than anybody watches, and evaluates nothing."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

torch.manual_seed(0)
x = torch.randn(640, 8)
train = TensorDataset(x, (x.sum(1) > 0).long())
dist.init_process_group("gloo")
model = DistributedDataParallel(nn.Linear(8, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
sampler = DistributedSampler(train, seed=1)
loader = DataLoader(train, batch_size=16, sampler=sampler)
for epoch in range(20):
    sampler.set_epoch(epoch)
    for inputs, labels in loader:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs), labels).backward()
        optimizer.step()
dist.destroy_process_group()
