"""Which rank gets which sample? ``DistributedSampler`` on 20 samples, and on 21 for two ranks.

    unisono run -n 2 examples/ddp/sampler.py

The classic mistakes that it avoids:

* *Padding counted twice.* torch's sampler repeats the first samples of the order until the ranks
  divide them. With 21 samples on 2 ranks one comes twice, and every mean counts it twice.
  ``exact=True`` gives each sample once; the first rank then has one more.
* *Forgetting* ``set_epoch``: every epoch has the same order. (Unisono's sampler says so, once.)
* ``shuffle`` *with a sampler*: ``DataLoader(..., shuffle=True, sampler=sampler)`` is refused by
  torch. The sampler shuffles, and the loader takes what it gives.
"""

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

import unisono


def samples_of_this_rank(dataset, epoch=0, **options):
    """Load all of this rank's samples, as a training loop does."""
    sampler = unisono.distributed.DistributedSampler(dataset, **options)
    sampler.set_epoch(epoch)  # before each epoch
    loader = DataLoader(dataset, batch_size=4, sampler=sampler)  # and no `shuffle`
    return torch.cat(list(loader)).tolist()


def show(title, dataset, epoch=0, **options):
    """Print every rank's samples in order. Collective: every rank calls it."""
    everybodys = [None] * dist.get_world_size()
    dist.all_gather_object(everybodys, samples_of_this_rank(dataset, epoch, **options))
    if dist.get_rank() == 0:
        print(title)
        for rank, samples in enumerate(everybodys):
            print(f"  rank {rank}: {' '.join(map(str, samples))}")
        everything = sorted(sum(everybodys, []))
        twice = {sample for sample in everything if everything.count(sample) > 1}
        print(f"  twice: {', '.join(map(str, sorted(twice))) or 'none'}")


def main():
    is_gpu = torch.cuda.is_available()
    if is_gpu:
        torch.cuda.set_device(unisono.world().local_rank)
    dist.init_process_group("nccl" if is_gpu else "unisono")
    try:
        for length in (20, 21):
            dataset = torch.arange(length)
            show(f"arange({length}), as it is", dataset, shuffle=False)
            show(f"arange({length}), shuffled", dataset)
            show(f"arange({length}), shuffled, set_epoch(1)", dataset, epoch=1)
            show(f"arange({length}), as it is, exact", dataset, shuffle=False, exact=True)
            show(f"arange({length}), shuffled, exact", dataset, exact=True)
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
