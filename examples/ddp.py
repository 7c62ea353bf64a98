"""An existing program of DistributedDataParallel, kept as it is but for the lines marked with ←.

`unisono run` starts any such program. With these lines it also counts each sample once, adds up
gradients in one order, and says which rank is late. `unisono new classifier` goes further: there a
lost worker is replaced, and the number of workers changes no bit.

unisono run -n 2 ddp.py
torchrun --nproc-per-node 2 ddp.py
unisono verify ddp.py                 # do two ranks compute what one does?
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader

import unisono
from unisono.data import digits
from unisono.distributed import DistributedDataParallel, DistributedSampler  # ←

BATCH_SIZE, EPOCHS = 48, 5  # of all ranks together


def loaders(world_size):
    """Read BATCH_SIZE samples a step for training, and each sample once for validation."""
    train_set, test_set = digits(), digits(train=False)
    assert BATCH_SIZE % world_size == 0, f"{world_size} ranks cannot share {BATCH_SIZE} samples"
    sampler = DistributedSampler(train_set, seed=0, drop_last=True)  # or padding counts some twice
    train = DataLoader(train_set, BATCH_SIZE // world_size, sampler=sampler, drop_last=True)
    each_once = DistributedSampler(test_set, shuffle=False, exact=True)  # ← no padding
    return train, DataLoader(test_set, 256, sampler=each_once)


def mean_over_all(loss_sum, hits, count, device):
    """Divide sums by counts, once: a mean of the ranks' means would be another number."""
    totals = torch.tensor([loss_sum, hits, count], dtype=torch.float64, device=device)
    dist.all_reduce(totals)
    return (totals[:2] / totals[2]).tolist()


@torch.no_grad()
def validate(model, loader, device):
    model.eval()
    sums = [0.0, 0.0, 0.0]
    for images, labels in loader:
        logits, labels = model(images.to(device)), labels.to(device)
        sums[0] += F.cross_entropy(logits, labels, reduction="sum").item()
        sums[1] += (logits.argmax(1) == labels).sum().item()
        sums[2] += len(labels)
    model.train()
    return mean_over_all(*sums, device)


def main():
    with unisono.distributed.init() as here:  # ← a process group under any launcher, and its end
        torch.manual_seed(0)
        model = nn.Sequential(nn.Flatten(), nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
        model.to(here.device)  # before DDP and the optimizer
        replica = DistributedDataParallel(model)
        optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
        train, test = loaders(here.world_size)
        for epoch in range(EPOCHS):
            train.sampler.set_epoch(epoch)  # or each epoch has the same order
            for images, labels in train:
                loss = F.cross_entropy(replica(images.to(here.device)), labels.to(here.device))
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            # The model itself: ranks may have different numbers of batches.
            mean, accuracy = validate(model, test, here.device)
            if here.rank == 0:
                print(f"epoch {epoch + 1}: validation loss {mean:.4f}, accuracy {accuracy:.4f}")
        if here.rank == 0:  # one rank writes, without the prefix `module.`
            torch.save(model.state_dict(), "model.pt")


if __name__ == "__main__":
    main()
