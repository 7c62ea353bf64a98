"""Trains in several calls, with all that workers do together; says what came of it, as JSON.

As a script: ``elsewhere.py [DIRECTORY]``; the standard output is one line a worker.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from pathlib import Path

import torch

import unisono
from unisono.runtime.world import threads_per_worker

sys.path.insert(0, str(Path(__file__).parents[2]))
from tests.loaders import loader_of
from tests.parity import cases

STEPS = 24


def train(
    directory: str | None = None, *, loader_workers: int = 0, steps: int = STEPS, every: int = 1
):
    """Train to `steps` steps; returns what must be the same everywhere."""
    torch.manual_seed(11)
    model = cases.Cnn(norm=True)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    trainer = unisono.Trainer(
        *(model, optimizer, cases.classify),
        shards=4,
        seed=3,
        directory=directory,
        checkpoint=None if directory is None else every,
    )
    loader = loader_of(cases.images(), cases.BATCH_SIZE, num_workers=loader_workers)
    for end in (steps // 2, steps):
        digest = trainer.fit(loader, steps=end).digest
    return {"digest": digest, "means": trainer.evaluate(loader)}


def listening() -> list[str]:
    """Name the sockets of this process that others could connect to."""
    mine = {os.readlink(f"/proc/self/fd/{fd}") for fd in _open_fds()}
    found = []
    for table in ("tcp", "tcp6", "unix"):
        for row in Path(f"/proc/self/net/{table}").read_text().splitlines()[1:]:
            words = row.split()
            inode = words[6] if table == "unix" else words[9]
            listens = words[3] == "00010000" if table == "unix" else words[3] == "0A"
            if listens and f"socket:[{inode}]" in mine:
                found.append(f"{table} {inode}")
    return found


def _open_fds() -> list[str]:
    return [fd for fd in os.listdir("/proc/self/fd") if os.path.exists(f"/proc/self/fd/{fd}")]


def main() -> None:
    here = unisono.world()
    with contextlib.redirect_stdout(sys.stderr):
        said = train(*sys.argv[1:2])
    facts = {"rank": here.rank, "by": here.started_by, "threads": threads_per_worker()}
    # In one write, so that the lines of different workers do not tear.
    os.write(1, json.dumps({**facts, **said, "listening": listening()}).encode() + b"\n")


if __name__ == "__main__":
    main()
