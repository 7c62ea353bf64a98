"""Gathers lists from ranks whose parts were padded; with `cut`, the repeats are left out again."""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


class Evaluator:
    def __init__(self, model, data):
        self.model, self.data = model, data

    def __call__(self):
        mine = []
        part = DistributedSampler(self.data, shuffle=False)
        with torch.no_grad():
            for x, y in DataLoader(self.data, 16, sampler=part):
                mine += (self.model(x).argmax(1) == y).tolist()
        gathered = [None] * dist.get_world_size()
        dist.all_gather_object(gathered, mine)
        hits = [hit for of_ranks in zip(*gathered, strict=True) for hit in of_ranks]
        if "cut" in sys.argv:
            hits = hits[: len(self.data)]
        return 100 * sum(hits) / len(hits)


torch.manual_seed(0)
x = torch.randn(191, 8)
y = (x.sum(1) > 0).long()
train, test = TensorDataset(x[:128], y[:128]), TensorDataset(x[128:], y[128:])
dist.init_process_group("gloo")
model = DistributedDataParallel(nn.Linear(8, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
sampler = DistributedSampler(train, seed=1)
loader, evaluate = DataLoader(train, batch_size=16, sampler=sampler), Evaluator(model, test)
for epoch in range(2):
    sampler.set_epoch(epoch)
    model.train()
    for inputs, labels in loader:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs), labels).backward()
        optimizer.step()
    model.eval()
    accuracy = evaluate()
    if dist.get_rank() == 0:
        print(f"accuracy {accuracy:.2f} %")
dist.destroy_process_group()
