"""What the three programs share: what is trained, and a clock that is read as ``bench.sides`` does.

The workload is ``cnn8``: the MNIST network at batch 8 per worker, from a tensor dataset. Each
program is what its framework's quick start makes of that, without logging of its own.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from bench.sides import SEED, leave_group
from bench.workloads import WORKLOADS

WORKLOAD = WORKLOADS["cnn8"]


class Sitting:
    """One program's share of the sitting: its data, its model, its clock. Final."""

    def __init__(self) -> None:
        parser = argparse.ArgumentParser()
        parser.add_argument("--warmup-steps", type=int, required=True)
        parser.add_argument("--timed-steps", type=int, required=True)
        parser.add_argument("--data", type=Path, required=True)
        parser.add_argument("--out", type=Path, required=True, help="what rank 0 writes")
        parser.add_argument("--limit-s", type=float, required=True, help="after which it ends")
        args = parser.parse_args()
        # torchrun's workers outlive it where it is killed: a hang in gloo ends here in any case.
        faulthandler.dump_traceback_later(args.limit_s, exit=True)
        torch.set_num_threads(1)
        torch.manual_seed(SEED)
        self.folder: Path = args.out.parent
        self.dataset, self._is_real = WORKLOAD.load(args.data, 0)
        self.batch_size = WORKLOAD.batch_size
        self.num_steps: int = args.warmup_steps + args.timed_steps
        self._warmup_steps: int = args.warmup_steps
        self._out: Path = args.out
        self._num_done = 0
        self._start_s = 0.0

    def model(self) -> nn.Module:
        """Make the network; every rank makes the same."""
        torch.manual_seed(SEED)
        return WORKLOAD.build()

    def adam(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.Adam(model.parameters(), lr=WORKLOAD.lr)

    def loss(self, model: nn.Module, batch: list[Tensor]) -> Tensor:
        assert len(batch[1]) == self.batch_size  # a framework might divide it among the ranks
        return WORKLOAD.loss(model, batch)

    def count_step(self) -> bool:
        """Count a step that is done; whether it was the last. Rank 0 then writes the result."""
        self._num_done += 1
        if self._num_done == self._warmup_steps:
            dist.barrier()
            self._start_s = time.perf_counter()
        if self._num_done < self.num_steps:
            return False
        dist.barrier()
        self._write(time.perf_counter() - self._start_s)
        return True

    def end(self) -> None:
        """End this process in good order, at once."""
        leave_group()

    def _write(self, seconds: float) -> None:
        if dist.get_rank() == 0:
            result: dict[str, Any] = {
                "seconds": seconds,
                "threads": torch.get_num_threads(),
                "data": "real" if self._is_real else "random",
                "workers": dist.get_world_size(),
            }
            self._out.write_text(json.dumps(result))
