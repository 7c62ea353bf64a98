"""The times of some consecutive steps, as they are judged together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from unisono.machine_load import MachineLoad
from unisono.step.phase_timers import DELAYED

Seconds = npt.NDArray[np.float64]

ToldStep: TypeAlias = "tuple[list[tuple[float, ...]], bool]"
"""Of one step, what each worker told, and whether it had a full batch."""

COLUMNS = (
    "between", "loading", "forward", "backward", "waiting", "summing", "updating", "delayed"
)  # fmt: skip
_PAUSE, _PAUSE_S = 10.0, 1e-3  # times the usual, and beyond that: no step begins so late


@dataclass(frozen=True, slots=True)
class StepWindow:
    """Some steps that the same workers computed with the same shards."""

    ranks: tuple[int, ...]  # the workers
    # in seconds, of shape (steps, ranks, columns): see `COLUMNS`. `delayed` is how long a worker
    # waited for a free core until the sum; NaN where nobody knows.
    times: Seconds
    shards: tuple[int, ...]  # how many each has, in the order of `ranks`
    batch_size: int  # samples of a step, all workers together
    # of their devices in the same order, where these are of several kinds; else empty
    speeds: tuple[float, ...] = ()
    updater: int | None = None  # the rank that alone updates; None: all do
    machine: MachineLoad | None = None  # its load meanwhile; None where nobody knows
    # whether workers compute with several threads, whose delays nobody sees
    has_threads: bool = False
    # whether passes run on the CPU; elsewhere they end when the host waits for them
    is_on_host: bool = True
    loader_workers: int = 0  # loader processes a worker

    @property
    def weights(self) -> Seconds:
        """How long each worker's share should take, in any unit; of shape (ranks,)."""
        shards = np.array(self.shards, dtype=float)
        return shards / np.array(self.speeds) if self.speeds else shards

    @property
    def times_without_pauses(self) -> Seconds:
        """The times, but of no step before which there was more than usual, as an evaluation."""
        between = self.times[..., COLUMNS.index("between")].max(axis=1)
        kept: Seconds = self.times[between <= _PAUSE * median_of(between) + _PAUSE_S]
        return kept


def median_of(values: Seconds) -> Seconds:
    """Give the median along the first axis; numpy's own loads a module first, for 10 ms."""
    ascending, num = np.sort(values, axis=0), len(values)
    middle: Seconds = ascending[[(num - 1) // 2, num // 2]].mean(axis=0)
    return middle


def times_of(rows: Sequence[ToldStep]) -> Seconds:
    """Give what workers spent in some consecutive steps, without the first, which has no before.

    Args:
        rows: of each step, what each worker told, as ``PhaseTimers.times``, and whether the step
            had a full batch; others are left out.

    Returns:
        Seconds, of shape (steps, workers, 8), as in :class:`StepWindow`.
    """
    told = np.array([times for times, _ in rows])
    phases = told[..., 1:DELAYED]
    ended_s = told[..., 0] + phases.sum(axis=2)
    between_s = told[1:, :, 0] - ended_s[:-1]
    columns = [between_s[..., None], phases[1:], told[1:, :, DELAYED:]]
    are_full = np.array([is_full for _, is_full in rows[1:]], dtype=bool)
    times: Seconds = np.concatenate(columns, axis=2)[are_full]
    return times
