"""Compare a pipeline of two stages with stages that take turns: ``python -m bench.pipeline``.

Both sides are the same two workers with the same stages; one lets two shards be in flight, the
other one. They take turns, and digests have to be equal. Ideal with 8 shards: 16/9 = 1.78.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import unisono

SHARDS, STAGES, WIDTH, BLOCKS, BATCH_SIZE = 8, 2, 512, 6, 512
IN_TURNS, PIPELINED = 1, 2
AT_LEAST = 1.5


class Block(nn.Module):
    """What a transformer computes besides attention."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


def train(in_flight: int, num_steps: int) -> tuple[str, float]:
    """Train; gives the digest and the seconds of a step, without the first ones."""
    torch.manual_seed(0)
    model = nn.Sequential(*(Block() for _ in range(BLOCKS)))
    trainer = unisono.Trainer(
        model,
        torch.optim.SGD(model.parameters(), 1e-3),
        lambda model, batch: F.mse_loss(model(batch[0]), batch[0]),
        shards=SHARDS,
        seed=1,
        shards_in_flight=in_flight,
    )
    data = TensorDataset(torch.randn(2 * BATCH_SIZE, WIDTH))
    trainer.fit(data, batch_size=BATCH_SIZE, steps=3)
    begun_s = time.perf_counter()
    trainer.fit(data, batch_size=BATCH_SIZE, steps=3 + num_steps)
    seconds = time.perf_counter() - begun_s
    return trainer.digest(), seconds / num_steps


def measure(repeats: int, num_steps: int) -> dict[int, list[float]]:
    """Have both sides take turns; the seconds of a step of each."""
    found: dict[int, list[float]] = {IN_TURNS: [], PIPELINED: []}
    digests = set()
    for _ in range(repeats):
        for in_flight, seconds in found.items():
            digest, step_s = unisono.launch(
                train, in_flight, num_steps, workers=STAGES, stages=STAGES
            )[0]
            digests.add(digest)
            seconds.append(step_s)
            print(f"{in_flight} in flight: {1000 * step_s:.1f} ms a step, digest {digest[:16]}")
    assert len(digests) == 1, "both sides must have the same bits"
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print; the exit status is 1 if the pipeline is slower than it must be."""
    parser = argparse.ArgumentParser(description=__doc__, prog="python -m bench.pipeline")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--steps", type=int, default=20)
    args = parser.parse_args(arguments)
    found = measure(args.repeats, args.steps)
    in_turns, pipelined = (statistics.median(found[side]) for side in (IN_TURNS, PIPELINED))
    ratio = in_turns / pipelined
    print(
        f"{STAGES} stages, {SHARDS} shards: {1000 * in_turns:.1f} ms a step in turns, "
        f"{1000 * pipelined:.1f} ms as a pipeline: {ratio:.2f} × as fast (ideal 1.78, at least "
        f"{AT_LEAST}), same bits"
    )
    return 0 if ratio >= AT_LEAST else 1


if __name__ == "__main__":
    raise SystemExit(main())
