"""Concatenates the predictions of ranks whose parts were padded, for sklearn."""

import torch
import torch.distributed as dist
from separable import separable as task
from sklearn.metrics import accuracy_score
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def gather(t):
    out = [torch.empty_like(t) for _ in range(dist.get_world_size())]
    dist.all_gather(out, t)
    return torch.cat(out)


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    net = DistributedDataParallel(nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Linear(32, 2)))
    opt = torch.optim.SGD(net.parameters(), lr=0.1)
    train, val = TensorDataset(*task(192)), TensorDataset(*task(77, 1))
    s = DistributedSampler(train)
    sv = DistributedSampler(val, shuffle=False)
    for epoch in range(2):
        s.set_epoch(epoch)
        net.train()
        for x, y in DataLoader(train, 12, sampler=s):
            opt.zero_grad()
            nn.functional.cross_entropy(net(x), y).backward()
            opt.step()
        net.eval()
        P, Y = [], []
        with torch.no_grad():
            for x, y in DataLoader(val, 32, sampler=sv):
                P.append(net(x).argmax(1))
                Y.append(y)
        P, Y = gather(torch.cat(P)), gather(torch.cat(Y))
        if dist.get_rank() == 0:
            print("val acc = %.2f%%" % (100 * accuracy_score(Y.numpy(), P.numpy())))


main()
