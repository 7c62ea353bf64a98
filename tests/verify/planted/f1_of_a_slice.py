"""Logs, on rank 0, sklearn's F1 over the slice that rank 0 has evaluated."""

import logging

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from separable import separable as task
from sklearn.metrics import f1_score
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
log = logging.getLogger("train")


def train_one_epoch(net, opt, x, y, rank, world, epoch):
    net.train()
    perm = torch.randperm(len(x), generator=torch.Generator().manual_seed(epoch))
    for chunk in perm.split(32):
        mine = chunk[rank::world]
        opt.zero_grad(set_to_none=True)
        F.cross_entropy(net(x[mine]), y[mine]).backward()
        opt.step()


@torch.inference_mode()
def evaluate(net, x, y, rank, world):
    net.eval()
    pred, true = [], []
    for i in range(rank * 16, len(x), 16 * world):
        pred.append(net(x[i : i + 16]).argmax(-1).numpy())
        true.append(y[i : i + 16].numpy())
    return f1_score(np.concatenate(true), np.concatenate(pred))


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(1)
    x, y = task(256)
    vx, vy = task(96, 1)
    net = DDP(nn.Sequential(nn.Linear(10, 16), nn.GELU(), nn.Linear(16, 2)))
    opt = torch.optim.AdamW(net.parameters(), lr=1e-2)
    for epoch in range(3):
        train_one_epoch(net, opt, x, y, rank, world, epoch)
        f1 = evaluate(net, vx, vy, rank, world)
        if rank == 0:
            log.info("epoch %d: val F1 %.4f", epoch, f1)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
