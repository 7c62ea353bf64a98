"""Hosts, their cores and the links between them: what a forecast supposes of machines."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from unisono.forecast.workload import Workload


@dataclass(frozen=True, slots=True)
class Cluster:
    """Equal hosts, each with one link to all others."""

    # of each host, which its workers share; None: each worker has a device of its own
    cores: int | None = None
    # over how many workers are spread, if there are so many; None: as `per_host` says
    hosts: int | None = None
    # how many workers a host takes at most; None, and no `hosts`: one host takes all
    per_host: int | None = None
    bandwidth: float = 1.25e9  # of each host's link in each direction, in bytes a second
    latency_s: float = 5e-5  # until a message's first byte is there

    def workers_on_hosts(self, num_workers: int) -> list[int]:
        """Count the workers of each host, the fullest first; sizes differ by at most one."""
        num_hosts = 1
        if self.hosts is not None:
            num_hosts = min(self.hosts, num_workers)
        elif self.per_host is not None:
            num_hosts = -(-num_workers // self.per_host)
        size, larger = divmod(num_workers, num_hosts)
        return [size + (host < larger) for host in range(num_hosts)]

    def transfer_s(self, num_bytes: float, work: Workload) -> float:
        """Give the seconds in which the hosts bring one bucket to everybody's sums.

        Each host sends every other one its slice of each part of its own, adds up its own slice,
        and gives the sum to all. The slices are sent at once; the sums go round a ring.

        Args:
            num_bytes: of the bucket.
            work: says how many hosts and parts there are.
        """
        num_others = work.num_hosts - 1
        if not num_others:
            return 0.0
        return sent_bytes(num_bytes, work) / self.bandwidth + (1 + num_others) * self.latency_s

    def exchange_s(self, buckets: Iterable[float], work: Workload) -> list[float]:
        """Give the seconds of each bucket's transfer."""
        return [self.transfer_s(num_bytes, work) for num_bytes in buckets]


def sent_bytes(num_bytes: float, work: Workload) -> float:
    """Count what a host sends for so many bytes of gradients: (k + 1) (H − 1) / H times as much.

    With one part a host (k = 1) these are the bytes of a ring all-reduce.
    """
    return num_bytes * (work.parts_of_host + 1) * (work.num_hosts - 1) / work.num_hosts
