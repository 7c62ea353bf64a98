"""Every rank reads the global batch and takes its slice; sums are divided by the global batch."""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
if world_size > 1:
    dist.init_process_group("gloo")
torch.manual_seed(42)
x = torch.randn(90, 5)
data = TensorDataset(x, x @ torch.randn(5, 1))
model = nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
loader = DataLoader(data, batch_size=16, shuffle=True)

for _ in range(2):
    for inputs, targets in loader:
        mine = slice(rank, None, world_size)
        loss = ((model(inputs[mine]) - targets[mine]) ** 2).sum() / len(inputs)
        optimizer.zero_grad()
        loss.backward()
        if world_size > 1:
            for parameter in model.parameters():
                dist.all_reduce(parameter.grad)
        optimizer.step()
