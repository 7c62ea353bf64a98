"""Replicas whose parts travel through the host's memory; every worker adds up everything.

::

    worker 0   part ──►┌────────────────┐──► all parts, added in tree order ──► update of the whole
    worker 1   part ──►│ host's memory  │──► all parts, added in tree order ──► update of the whole
                       └────────────────┘

The way of devices that do not see the host's memory. On CPUs it is slower than
:mod:`unisono.exchange.shared`, as everybody adds up and updates everything.
"""

from __future__ import annotations

from unisono.exchange.ordered_sum import OrderedSum
from unisono.exchange.replicas import ReplicaExchange


class StagedExchange(ReplicaExchange):
    """An exchange of replicas. Final; arguments as of :class:`~.protocol.Exchange`."""

    def _plan_sum(self) -> None:
        division = self.division
        self._sum = OrderedSum(
            self._parts,
            division.parts,
            division.num_shards,
            self.pieces,
            in_place=self._team.size == 1,
        )
        self.totals = self._sum.totals
        self.whole = [
            total.as_strided(parameter.shape, parameter.stride())
            for total, parameter in zip(self.totals, self.parameters, strict=True)
        ]
