"""What do workers of one host cost each other? Between what was measured on one and on several.

Where `M` workers were measured, all of this gives what was measured. Else:

* a shard takes longer by a straight line through one and `M` busy workers, and never less;
* more workers than cores share these fairly;
* the optimizer's time has a part that the workers divide among themselves, and one they do not;
* adding up grows with the bytes that a worker reads: (parts − 1) / workers of all gradients;
* meetings in shared memory grow with the logarithm of the workers, transfers through the host's
  memory (replicas) with their number.
"""

from __future__ import annotations

import math

from unisono.forecast.spread import Values
from unisono.forecast.step_profile import SHARED, StepProfile
from unisono.forecast.workload import Workload, num_parts


class HostModel:
    """The fullest host of a number of workers. Final.

    Args:
        profile: what was measured.
        work: how a step is divided.
        cores: of the host; None: each worker has a device of its own.
    """

    def __init__(self, profile: StepProfile, work: Workload, cores: int | None) -> None:
        self._alone, self._together, self._work = profile.alone, profile.together, work
        self._is_shared = profile.exchange == SHARED
        self._here = work.on_hosts[0]
        self._cores = self._here if cores is None else cores
        self._busy = min(self._here, self._cores)

    @property
    def shard_s(self) -> float:
        """The mean seconds of a shard while all workers of the host compute."""
        alone = float(self._alone.shard_s.mean())
        if self._together is None:
            return alone
        measured, together = self._together.num_workers, float(self._together.shard_s.mean())
        if together < alone and self._busy > measured:
            return together  # more workers than were measured are not faster still
        return alone + (together - alone) / (measured - 1) * (self._busy - 1)

    def sharing(self, num_shards: int) -> float:
        """Say by how much sharing cores makes a worker with so many shards slower, at least 1.

        Those with fewer shards leave the cores to the others when they are done.
        """
        done, left, taken = 0, self._here, 0.0
        for size, count in reversed(self._work.sizes_here):
            taken += (min(size, num_shards) - done) * max(1.0, left / self._cores)
            done, left = min(size, num_shards), left - count
            if done == num_shards:
                return taken / num_shards
        return max(1.0, self._here / self._cores)

    def summing_s(self, drawn: Values) -> Values:
        """Scale the seconds of adding up."""
        together, work = self._together, self._work
        if work.num_workers == 1 or together is None:
            return drawn
        measured, alone = together.num_workers, float(self._alone.summing_s.mean())
        grown = float(together.summing_s.mean()) - alone
        read_then = (num_parts(sum(together.shards), measured) - 1) / measured
        # Of the host's own parts; those of other hosts are added up while buckets travel.
        read = (work.parts_here - work.parts_of_host) / self._busy
        return _with_mean(drawn, alone + grown * read / read_then)

    def updating_s(self, drawn: Values) -> Values:
        """Scale the seconds of the optimizer."""
        alone = float(self._alone.updating_s.mean())
        if self._work.num_workers == 1:
            return drawn
        if self._together is None:
            return drawn / self._busy if self._is_shared else drawn
        measured, mean = self._together.num_workers, float(self._together.updating_s.mean())
        fixed = min(max((mean - alone / measured) / (1 - 1 / measured), 0.0), alone)
        divided = alone - fixed
        then = fixed + divided / measured
        return drawn * ((fixed + divided / self._busy) / then) if then > 0 else drawn

    def rest_s(self, drawn: Values) -> Values:
        """Scale the seconds of meetings, transfers within the host, and what is between steps."""
        if self._work.num_workers == 1 or self._together is None:
            return drawn
        measured, alone = self._together.num_workers, float(self._alone.rest_s.mean())
        growth = math.log2(self._here) / math.log2(measured)
        if not self._is_shared:
            growth = (self._here - 1) / (measured - 1)
        return _with_mean(drawn, alone + (float(self._together.rest_s.mean()) - alone) * growth)


def _with_mean(drawn: Values, mean: float) -> Values:
    """Scale values so that they have this mean, at least 0."""
    before = float(drawn.mean())
    scaled: Values = drawn * (max(mean, 0.0) / before) if before > 0 else drawn * 0 + max(mean, 0.0)
    return scaled
