"""Which samples does this rank get? torch's ``DistributedSampler``, with each sample exactly once.

::

    order of an epoch    a b c d e f g           rank 0   rank 1   rank 2
    torch: padded        a b c d e f g a b       a d g    b e a    c f b
    exact: as it is      a b c d e f g           a d g    b e      c f

torch's own class determines the order, so the order is that of the installed version.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch.distributed as dist
from torch.utils.data import DistributedSampler as TorchDistributedSampler

from unisono.runtime.whole import check_flag
from unisono.runtime.world import world


class DistributedSampler(TorchDistributedSampler[int]):
    """Gives each rank its part of a dataset, as ``torch.utils.data.DistributedSampler`` does.

    With ``exact=False`` the indices are torch's: if the samples cannot be divided evenly, the first
    few samples of the order occur twice, so that every rank has the same number. A mean over them
    counts those samples twice. With ``exact=True`` every sample occurs exactly once, and the first
    ranks may have one more sample than the others.

    Uneven lengths need care. Ranks with an additional batch must not wait in it for the others:

    * *Evaluation*: call the model without DDP (``model.module``), reduce the **sums** over all
      ranks and divide once: ``all_reduce(loss_sum); all_reduce(count); loss_sum / count``. A mean
      of the ranks' means gives a short rank's samples more weight.
    * *Training*: put the loop into ``with model.join():``, torch's context manager for this, or
      train with ``unisono.Trainer``, where the last batch may have any size.

    With ``shuffle=True`` the order depends on ``seed`` and the epoch, so call :meth:`set_epoch`
    before each epoch.

    Args:
        dataset: anything with a length that does not change.
        num_replicas: how many ranks share it; by default those of the process group, or, where
            there is none, those of :func:`unisono.world`.
        rank: which of them this is; by default as above.
        shuffle: whether the order is drawn anew for each epoch.
        seed: fixes the orders; the same on every rank.
        drop_last: whether the last samples are left out, instead of some padded, where the ranks
            do not divide the samples. Not together with `exact`.
        exact: whether every sample comes exactly once.

    Raises:
        ValueError: `rank` is not one of `num_replicas`, or both `exact` and `drop_last` are asked
            for; later, the dataset's length has changed.
        TypeError: `exact` is neither True nor False.
    """

    def __init__(
        self,
        dataset: Any,
        num_replicas: int | None = None,
        rank: int | None = None,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
        *,
        exact: bool = False,
    ) -> None:
        check_flag("exact", exact)
        own_rank, world_size = _place()
        num_replicas = world_size if num_replicas is None else num_replicas
        rank = own_rank if rank is None else rank
        if not 0 <= rank < num_replicas:
            raise ValueError(
                f"`rank` must be at least 0 and below `num_replicas` ({num_replicas}), but is "
                f"{rank}: pass both of them, or neither once the process group is set up."
            )
        if exact and drop_last:
            raise ValueError(
                "`exact` gives every sample exactly once and `drop_last` leaves some out, but both "
                "are True: pass only one of them."
            )
        super().__init__(dataset, num_replicas, rank, shuffle, seed, drop_last)
        self.exact = exact
        if exact:
            self.total_size = len(dataset)
            self.num_samples = len(range(rank, self.total_size, num_replicas))

    def __iter__(self) -> Iterator[int]:
        """Return this rank's indices, in the order of the current epoch."""
        if not self.exact:
            return super().__iter__()
        if len(self.dataset) != self.total_size:  # type: ignore[arg-type]
            raise ValueError(
                f"the dataset must have as many samples as when its sampler was made, but had "
                f"{self.total_size:,} and has {len(self.dataset):,}: make a new sampler."  # type: ignore[arg-type]
            )
        whole: TorchDistributedSampler[int] = TorchDistributedSampler(
            self.dataset, num_replicas=1, rank=0, shuffle=self.shuffle, seed=self.seed
        )
        whole.set_epoch(self.epoch)
        return iter(list(whole)[self.rank :: self.num_replicas])


def _place() -> tuple[int, int]:
    """Return (rank, world size) of the process group, or else of the environment."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    here = world()
    return here.rank, here.world_size
