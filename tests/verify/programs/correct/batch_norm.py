"""DDP with batch norm and bfloat16, loader processes, augmentation from numpy, seeds by rank."""

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler


class Images(Dataset):
    def __init__(self):
        generator = torch.Generator().manual_seed(0)
        self.x = torch.randn(64, 1, 8, 8, generator=generator)

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        image = self.x[index]
        if np.random.rand() < 0.5:
            image = image.flip(-1)
        return image, int(self.x[index].mean() > 0)


def seed_worker(number):
    np.random.seed(torch.initial_seed() % 2**32)


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
        nn.Linear(8, 2),
    )  # fmt: skip
    model = DDP(net)
    torch.manual_seed(1 + dist.get_rank())
    data = Images()
    sampler = DistributedSampler(data)
    loader = DataLoader(
        data, 8, sampler=sampler, num_workers=1, worker_init_fn=seed_worker, persistent_workers=True
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for x, y in loader:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = nn.functional.cross_entropy(model(x), y)
            optimizer.zero_grad(set_to_none=False)
            loss.backward()
            optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
