"""Predictions for a dataset: one row per sample, in dataset order.

The leader computes one batch to find out what a row is. All workers of a host then open one unnamed
file, or memory if the rows are not needed later, and each writes the rows of its shards once (see
``predictions``). For predictions outside of loops the launcher keeps the file open until the job
ends: a replacement of a lost worker gets the rows from it.
"""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any, final

from unisono.runtime.workers.launcher_messages import ROW_KEYS, MemoryReleased
from unisono.runtime.workers.replicated_calls import ReplicatedCalls
from unisono.training.failures import share_outcome
from unisono.training.predictions import (
    Rows,
    form_of,
    layout_of,
    put_together,
    share_rows,
    taken_apart,
)
from unisono.training.sweep import Forward, PartsOf, Sweep

_RELEASED_KEYS = 1 << 61  # the first key of predictions not needed later
_NUM_KEYS = 1 << 61  # above each of the two first keys

Said = dict[str, Any]
"""What the leader sends about the file: its layout, the form of the output, and its key."""


@final
class Predictor:
    """Computes one prediction."""

    def __init__(self, sweep: Sweep, forward: Forward) -> None:
        self._sweep, self._forward, self._team = sweep, forward, sweep.team

    def once(self, replicated_calls: ReplicatedCalls) -> Any:
        """Compute every row; a replacement takes the rows of the others instead. Collective."""
        found: list[Any] = []
        is_kept = replicated_calls.is_recorded and self._team.supervisor.can_replace

        def act() -> bytes:
            with ExitStack() as stack:
                said, fd = self._predict(is_kept, stack)
                found.append(_taken(said, fd))
            return json.dumps(said).encode()

        said = json.loads(replicated_calls.together("predict", act))
        if found:
            return found[-1]
        fd = self._team.memory_fd(said["key"], said["num_bytes"])
        try:
            return _taken(said, fd)
        finally:
            os.close(fd)

    def _predict(self, is_kept: bool, stack: ExitStack) -> tuple[Said, int]:
        """Compute every row; return the facts of their file and its descriptor. Collective."""
        sweep, team = self._sweep, self._team
        sweep.agree("predict")
        with sweep.under_way() as parts_of:
            told = share_outcome(
                lambda speak: team.gather_from_host_leaders(speak, "file of predict"),
                lambda: self._look(parts_of, is_kept),
                team.world.rank,
            )
            said = {**told[team.host], "key": told[0]["key"]}  # all hosts use that of the first
            return said, self._write(said, parts_of, stack)

    def _look(self, parts_of: PartsOf, is_kept: bool) -> Said:
        """Compute a batch to find out what a row is."""
        # The order is that of the dataset, so its first sample is in the first shard.
        sweep = self._sweep
        with sweep.explained():
            first = next(parts_of([0]))
            output = self._forward(sweep.model, first.data)
        rows = taken_apart(output, first.num_samples)
        layout, num_bytes = layout_of(rows, sweep.plan.num_samples)
        key = secrets.randbelow(_NUM_KEYS) + (ROW_KEYS if is_kept else _RELEASED_KEYS)
        form = form_of(output)
        return {"form": form, "layout": layout, "num_bytes": num_bytes, "key": key}

    def _write(self, said: Said, parts_of: PartsOf, stack: ExitStack) -> int:
        """Write the rows of this worker's shards; return the file's descriptor. Collective."""
        plan, host = self._sweep.plan, b"%d" % self._team.host
        order, opened = plan.order(0), list[tuple[int, Rows]]()

        def write(shards: Sequence[int]) -> dict[int, bytes]:
            if not opened:
                fd = self._open(said, stack)
                opened.append((fd, Rows(fd, said["layout"], is_private=False)))
            for part in parts_of(shards):
                output = self._forward(self._sweep.model, part.data)
                indices = plan.shard_indices(order, part.batch, part.shard)
                opened[0][1].write(indices, taken_apart(output, part.num_samples))
            return dict.fromkeys(shards, host)

        told = self._sweep.by_all_workers(write, "rows of predict")
        (fd, rows), *_ = opened
        share_rows(rows, self._team, {shard: int(host) for shard, host in told.items()}, plan)
        return fd

    def _open(self, said: Said, stack: ExitStack) -> int:
        """Open the file that all workers of this host share. Collective."""
        try:
            fd = self._team.memory_fd(said["key"], said["num_bytes"])
        except OSError as error:
            raise OSError(
                f"rank {self._team.world.rank} cannot open the unnamed temporary file that "
                f"predictions are written to: {str(error).removesuffix('.')}."
            ) from None
        stack.callback(os.close, fd)
        if said["key"] < ROW_KEYS:
            stack.callback(self._team.supervisor.notify, MemoryReleased(said["key"]))
        return fd


def _taken(said: Said, fd: int) -> Any:
    return put_together(said["form"], Rows(fd, said["layout"], is_private=True).tensors)
