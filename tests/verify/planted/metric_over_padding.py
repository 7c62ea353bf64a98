"""Has torchmetrics put ranks together whose parts were padded."""

import torch
import torch.distributed as dist
from separable import separable as task
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
from torchmetrics.classification import MulticlassAccuracy

dist.init_process_group("gloo")
torch.manual_seed(0)
model = DistributedDataParallel(nn.Sequential(nn.Linear(10, 8), nn.ReLU(), nn.Linear(8, 2)))
opt = torch.optim.Adam(model.parameters(), 1e-2)
train, test = TensorDataset(*task(128)), TensorDataset(*task(63, 1))
sampler = DistributedSampler(train)
tl, vl = (
    DataLoader(train, 16, sampler=sampler),
    DataLoader(test, 16, sampler=DistributedSampler(test, shuffle=False)),
)
acc = MulticlassAccuracy(num_classes=2, average="micro")
for epoch in range(3):
    sampler.set_epoch(epoch)
    for x, y in tl:
        opt.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        opt.step()
    model.eval()
    with torch.no_grad():
        for x, y in vl:
            acc.update(model(x), y)
    model.train()
    value = acc.compute().item()
    if dist.get_rank() == 0:
        print(f"epoch {epoch} accuracy {value:.4f}")
    acc.reset()
