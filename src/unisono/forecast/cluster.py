"""Hosts, their cores and the links between them: what a forecast supposes of machines."""

from __future__ import annotations

from dataclasses import dataclass

from unisono.forecast.workload import Workload

BUCKET_BYTES = 1 << 19
"""What a bucket has for each host, as in ``exchange/host_crossing.py``."""
ROUNDS, MEETINGS = 2, 3
"""How often a bucket's bytes, and the workers of a step, wait for something from other hosts."""
_PAYLOAD = 1448 / 1538  # the rest: Ethernet, IP and TCP, with frames of 1,500 bytes


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
    # of a core, for each byte that a host sends: sending, receiving, adding up
    copying_s: float = 0.0

    def workers_on_hosts(self, num_workers: int) -> list[int]:
        """Count the workers of each host, the fullest first; sizes differ by at most one."""
        num_hosts = 1
        if self.hosts is not None:
            num_hosts = min(self.hosts, num_workers)
        elif self.per_host is not None:
            num_hosts = -(-num_workers // self.per_host)
        size, larger = divmod(num_workers, num_hosts)
        return [size + (host < larger) for host in range(num_hosts)]

    def transfer_s(self, num_sent: float) -> float:
        """Give the seconds for which so many bytes that a host sends keep its link busy."""
        return num_sent / (self.bandwidth * _PAYLOAD)

    def copied_s(self, num_sent: float, work: Workload) -> float:
        """Give the seconds that they take a worker's core; none where a host has others to spare.

        The workers of a host divide them.
        """
        if self.cores is not None and self.cores > work.on_hosts[0]:
            return 0.0
        return self.copying_s * num_sent / min(work.on_hosts)


def sent_bytes(num_bytes: float, work: Workload) -> float:
    """Count what a host sends for so many bytes of gradients: (k + 1) (H − 1) / H times as much.

    Each host sends every other one its slice of each part of its own, adds up its own slice, and
    sends the sum to all. With one part a host (k = 1) these are the bytes of a ring all-reduce.
    """
    return num_bytes * (work.parts_of_host + 1) * (work.num_hosts - 1) / work.num_hosts
