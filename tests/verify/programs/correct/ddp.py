"""A tutorial's DDP: sampler, set_epoch, evaluation whose sums are put together."""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler, Subset


class Points(Dataset):
    def __init__(self, length):
        generator = torch.Generator().manual_seed(1)
        self.x = torch.randn(length, 10, generator=generator)
        self.y = (self.x[:, 0] > 0).long() + (self.x[:, 1] > 0).long()

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        return self.x[index], self.y[index]


def evaluate(model, loader):
    model.eval()
    sums = torch.zeros(2)
    with torch.no_grad():
        for x, y in loader:
            sums[0] += (model(x).argmax(1) == y).sum()
            sums[1] += len(y)
    dist.all_reduce(sums)
    model.train()
    return (sums[0] / sums[1]).item()


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    data = Points(120)
    train_set, test_set = Subset(data, range(100)), Subset(data, range(100, 120))
    sampler = DistributedSampler(train_set)
    train_loader = DataLoader(train_set, batch_size=8, sampler=sampler)
    test_sampler = DistributedSampler(test_set, shuffle=False)
    test_loader = DataLoader(test_set, batch_size=8, sampler=test_sampler)
    model = DDP(nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Linear(32, 3)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=3 * len(train_loader))
    loss_fn = nn.CrossEntropyLoss()
    for epoch in range(3):
        sampler.set_epoch(epoch)
        for x, y in train_loader:
            optimizer.zero_grad()
            loss_fn(model(x), y).backward()
            optimizer.step()
            scheduler.step()
        accuracy = evaluate(model, test_loader)
        if int(os.environ["RANK"]) == 0:
            print(f"epoch {epoch}: accuracy {accuracy:.2f}")
            torch.save(model.module.state_dict(), "model.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
