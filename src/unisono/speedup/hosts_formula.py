"""What would several hosts like this one bring? One formula, whose inputs are printed.

::

    step = passes · m(H W) / m(W) + update + (k + 1) (H − 1) / H · bytes / link

    H hosts of W workers each, S shards; m(n): the most shards that one of n workers has
    passes     of the slowest of W workers on this host                           measured
    update     the optimizer, sums and meetings of W workers on this host         measured
    k          how many sub-trees of the sum a host's shards are: 1 as in a ring
    link       bytes a second, without the 6 % that Ethernet, IP and TCP take

Batch, shards and so all bits stay as they are; therefore it ends at S workers.
"""

from __future__ import annotations

from dataclasses import dataclass

from unisono.plan.hosts import parts_of_hosts
from unisono.speedup.efficiency import most_shards
from unisono.speedup.measured_steps import Measured

_PAYLOAD = 1448 / 1538  # of a frame of 1,500 bytes


@dataclass(frozen=True, slots=True)
class OnHosts:
    """A step on several hosts."""

    hosts: int  # H
    workers_per_host: int  # W
    shards_of_worker: int  # m(H W)
    parts_of_host: int  # k
    bandwidth: float  # of each host's link in each direction, in bytes a second
    passes_s: float  # this and the next two: what a step is made of
    links_s: float
    update_s: float
    step_s: float
    speed_up: float  # over one worker


def on_hosts(measured: Measured, num_hosts: int, bandwidth: float) -> OnHosts:
    """Compute a step of several hosts, each with the most workers that were timed and that fit.

    Args:
        measured: on this host.
        num_hosts: H, at least 2.
        bandwidth: as in :class:`OnHosts`.

    Raises:
        ValueError: there are fewer shards than hosts.
    """
    shards = measured.num_shards
    fit = [one for one in measured.steps if one.num_workers * num_hosts <= shards]
    if not fit:
        raise ValueError(
            f"`--hosts` must be at most the program's `shards` ({shards}), but is {num_hosts}: "
            "pass larger `shards` in the program."
        )
    steps, each = fit[-1], fit[-1].num_workers
    most = most_shards(shards, each * num_hosts)
    parts = max(parts_of_hosts(shards, [each] * num_hosts))
    sent_bytes = measured.gradient_bytes * (parts + 1) * (num_hosts - 1) / num_hosts
    passes_s = steps.slowest_s * most / most_shards(shards, each)
    links_s = sent_bytes / (bandwidth * _PAYLOAD)
    update_s = steps.updating_s + steps.exchange_s
    step_s = passes_s + links_s + update_s
    speed_up = measured.steps[0].step_s / step_s
    return OnHosts(
        num_hosts, each, most, parts, bandwidth, passes_s, links_s, update_s, step_s, speed_up
    )
