"""What does watching for slow workers cost a step? ``python -m bench.watching``, a minute.

One run of two workers has it switched off and on every eight steps, in random order within each
pair of blocks, so that whatever else the machine does meets both. The first step of a block is left
out, and so are the first blocks.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import time
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import unisono
from bench import machine
from unisono.step.phase_timers import PhaseTimers
from unisono.train import speed_watch
from unisono.train.speed_watch import SpeedWatch
from unisono.workers.team import Team

BLOCK_STEPS, SKIPPED_BLOCKS = 8, 4
_WATCHING = (
    (PhaseTimers, "begin"),
    (PhaseTimers, "lap"),
    (PhaseTimers, "arrive"),
    (SpeedWatch, "after_step"),
    (Team, "note_times"),
)
Block = tuple[bool, list[float]]
"""Whether steps were watched, and what each took in seconds."""


class Switch(unisono.callbacks.Callback):
    """Switches watching off and on, and times the steps between. Final."""

    def __init__(self) -> None:
        self.blocks: list[Block] = [(True, [])]
        self._began_s = 0.0
        for owner, name in _WATCHING:
            self._make_switchable(owner, name)

    def _make_switchable(self, owner: type[Any], name: str) -> None:
        method = owner.__dict__[name]

        def switched(*arguments: Any) -> None:
            if self.blocks[-1][0]:
                method(*arguments)

        setattr(owner, name, switched)

    def on_step_end(self, fit: Any, step: Any) -> None:
        now_s = time.perf_counter()
        self.blocks[-1][1].append(now_s - self._began_s)
        if len(self.blocks[-1][1]) == BLOCK_STEPS:
            number = len(self.blocks)
            is_watched_first = random.Random(number // 2).random() < 0.5
            self.blocks.append((is_watched_first ^ bool(number % 2), []))
        self._began_s = time.perf_counter()


def main() -> int:
    """Train and print what watching adds, with a 95 % interval from resampled pairs."""
    parser = argparse.ArgumentParser(prog="python -m bench.watching", description=__doc__)
    parser.add_argument("--steps", type=int, default=12_000)
    parser.add_argument("--batch", type=int, default=16, help="samples of a step")
    parser.add_argument("--window", action="store_true", help="as within a window, without rests")
    args = parser.parse_args()
    others = machine.Others()
    given = (args.steps, args.batch, args.window)
    blocks = unisono.launch(train, *given, workers=2)[0][SKIPPED_BLOCKS:]
    pairs = [medians(*pair) for pair in zip(blocks[::2], blocks[1::2], strict=False)]
    added_s = [on - off for on, off in pairs]
    step_s, middle_s = statistics.median(off for _, off in pairs), statistics.median(added_s)
    again = sorted(statistics.median(random.choices(added_s, k=len(pairs))) for _ in range(1000))
    print(
        f"watching adds {middle_s * 1e6:.1f} µs to a step of {step_s * 1e3:.2f} ms, "
        f"{middle_s / step_s:.1%}: the median of {len(pairs)} pairs of {BLOCK_STEPS} steps; "
        f"95 % of resampled medians are between {again[25] * 1e6:.1f} and {again[975] * 1e6:.1f} µs"
    )
    print(others)
    return 0


def train(steps: int, batch_size: int, is_window: bool) -> list[Block]:
    """Train a small network on this worker; give its whole blocks."""
    if is_window:
        speed_watch._REST_AT_LEAST_S = speed_watch._REST_AT_MOST_S = 0.0
    torch.manual_seed(0)
    layers = [nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 16, 3, padding=1), nn.ReLU()]
    model = nn.Sequential(*layers, nn.Flatten(), nn.Linear(16 * 64, 10))
    samples = TensorDataset(
        torch.randn(64 * batch_size, 1, 8, 8), torch.randint(0, 10, (64 * batch_size,))
    )
    switch = Switch()
    trainer = unisono.Trainer(
        model,
        torch.optim.SGD(model.parameters(), lr=0.01),
        lambda model, batch: F.cross_entropy(model(batch[0]), batch[1]),
        shards=2,
        callbacks=[switch],
    )
    trainer.fit(samples, batch_size=batch_size, steps=steps)
    return switch.blocks[:-1]


def medians(one: Block, other: Block) -> tuple[float, float]:
    """Give the median of a pair's steps with watching, and without, the first of each left out."""
    watched, plain = (one, other) if one[0] else (other, one)
    return statistics.median(watched[1][1:]), statistics.median(plain[1][1:])


if __name__ == "__main__":
    sys.exit(main())
