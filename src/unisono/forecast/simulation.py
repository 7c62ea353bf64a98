"""One step on N workers, by the causes of its time.

::

    worker 0   loading, passes of its shards ──────────│··waits··│
    worker 1   loading, passes of its shards ────────────────────│ sum │ update │ meetings, rest
    link             bucket 0 │ bucket 1 │ … │ last bucket ──────────┘
                     as soon as the slowest worker's last backward pass has left its gradients

Each simulated step draws a measured one. What all workers of a step had in common is taken from it;
by how much they differ is drawn anew for N of them. Every time is a sum or a maximum of times that
shrink when links get faster, so a faster link never makes a step longer.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np

from unisono.forecast.cluster import BUCKET_BYTES, MEETINGS, ROUNDS, Cluster, sent_bytes
from unisono.forecast.host_model import HostModel
from unisono.forecast.spread import Values, calibration, largest_of, levels
from unisono.forecast.step_profile import StepProfile
from unisono.forecast.workload import Workload

IDEAL = "ideal"
CAUSES = {
    "cores": "more workers than cores",
    "contention": "workers of a host slow each other",
    "shards": "shards do not divide evenly",
    "stragglers": "the slowest worker of each step",
    "bandwidth": "of the links between hosts: gradients that are still under way",
    "copying": "cores send, receive and add up what goes between hosts",
    "latency": "of the links between hosts: the last bucket's rounds, and meetings",
    "sum": "adding up gradients",
    "update": "the optimizer",
    "rest": "meetings, and what is between steps",
}
"""What makes a step longer than ideal, in words."""
_DRAWS = 500


@dataclass(frozen=True, slots=True)
class SimulatedStep:
    """The mean of many simulated steps."""

    seconds: float  # of a step
    own_s: float  # of these, until the slowest worker is done with its shards
    # the ideal time, and what each cause adds; they add up to `seconds`
    causes_s: Mapping[str, float]


def simulate(profile: StepProfile, work: Workload, cluster: Cluster) -> SimulatedStep:
    """Simulate steps of N workers.

    Args:
        profile: what is known of steps.
        work: how a step is divided.
        cluster: the hosts.
    """
    alone, host = profile.alone, HostModel(profile, work, cluster.cores)
    source = alone if work.num_workers == 1 else profile.several
    num_steps = len(source.step_s)
    drawn = source.some(np.arange(num_steps * -(-_DRAWS // num_steps)) % num_steps)
    common_s, own_s, unshared_s = _shards(profile, work, host, drawn.shard_s)
    exchanged_s = _exchanged(profile, work, cluster, own_s)
    at_once, by_others = (
        _exchanged(profile, work, one, own_s).mean()
        for one in (replace(cluster, latency_s=0.0), replace(cluster, latency_s=0.0, copying_s=0.0))
    )
    summing_s = host.summing_s(drawn.summing_s)
    updating_s = host.updating_s(drawn.updating_s)
    rest_s = host.rest_s(drawn.rest_s)
    part = work.batch_size / profile.batch_size / work.num_workers
    each = work.num_shards / work.num_workers
    common, own, unshared = common_s.mean(), own_s.mean(), unshared_s.mean()
    causes = {
        IDEAL: alone.step_s.mean() * part,
        "cores": own - unshared,
        "contention": (common - alone.shard_s.mean()) * each,
        "shards": common * (work.most_shards - each),
        "stragglers": unshared - common * work.most_shards,
        "bandwidth": by_others - own,
        "copying": at_once - by_others,
        "latency": exchanged_s.mean() - at_once,
        "sum": summing_s.mean() - alone.summing_s.mean() * part,
        "update": updating_s.mean() - alone.updating_s.mean() * part,
        "rest": rest_s.mean() - alone.rest_s.mean() * part,
    }
    seconds = (exchanged_s + summing_s + updating_s + rest_s).mean()
    return SimulatedStep(
        float(seconds), float(own), {cause: float(value) for cause, value in causes.items()}
    )


def _shards(
    profile: StepProfile, work: Workload, host: HostModel, shard_s: Values
) -> tuple[Values, Values, Values]:
    """Simulate loading and passes.

    Args:
        profile, work, host: as of :func:`simulate`.
        shard_s: of the steps that are drawn, of shape (draws, workers).

    Returns:
        Seconds of each draw: of a shard in the mean of the workers; until the slowest worker is
        done; and the same if it had a core for itself.
    """
    generator, num_draws = np.random.default_rng(0), len(shard_s)
    source = profile.several.shard_s
    if work.num_workers == 1:
        common_s, deviations = shard_s.mean(axis=1), np.zeros(1)
    elif source.shape[1] == 1:
        common_s, deviations = np.full(num_draws, source.mean()), np.sort(source[:, 0])
        deviations = deviations - source.mean()
    else:
        common_s = shard_s.mean(axis=1)
        apart = source - source.mean(axis=1, keepdims=True)
        deviations = np.sort(apart.ravel()) * calibration(source)
    scale = host.shard_s / float(common_s.mean()) if common_s.any() else 1.0
    common_s, deviations = common_s * scale, deviations * scale
    own_s, unshared_s = np.zeros(num_draws), np.zeros(num_draws)
    for num_shards, num_workers in work.sizes:
        slowest_s = largest_of(deviations, num_workers, levels(num_draws, generator))
        done_s = num_shards * np.maximum(common_s + slowest_s, 0.0)
        unshared_s = np.maximum(unshared_s, done_s)
        own_s = np.maximum(own_s, done_s * host.sharing(num_shards))
    return common_s, own_s, unshared_s


def _exchanged(profile: StepProfile, work: Workload, cluster: Cluster, own_s: Values) -> Values:
    """Say when all hosts have all sums: buckets travel one after the other, each when it is ready.

    Copying takes the core of a worker: from its last pass for the buckets that are ready before, so
    that later ones are ready later; then while it waits. All is done when the core has done both,
    or has copied what comes from a bucket's arrival on.

    Args:
        profile, work, cluster: as of :func:`simulate`.
        own_s: until the slowest worker is done, of shape (draws,).
    """
    if work.num_hosts == 1 or not any(profile.gradient_bytes):
        return own_s
    last_pass_s = own_s / work.most_shards * profile.backward_share
    arrived_s, crossings = np.zeros_like(own_s), list(_crossings(profile, work))
    all_s = left_s = cluster.copied_s(sum(num_sent for _, num_sent in crossings), work)
    done_s, seen, taken_s = own_s + all_s, 0.0, 0.0
    for ready, num_sent in crossings:
        if ready > seen:
            seen, taken_s = ready, all_s - left_s
        ready_s = own_s - last_pass_s * (1 - ready) + taken_s
        arrived_s = np.maximum(arrived_s, ready_s) + cluster.transfer_s(num_sent)
        done_s = np.maximum(done_s, arrived_s + left_s)
        left_s -= cluster.copied_s(num_sent, work)
    done: Values = done_s + (ROUNDS + MEETINGS) * cluster.latency_s
    return done


def _crossings(profile: StepProfile, work: Workload) -> Iterator[tuple[float, float]]:
    """Say when something can leave a host, as a part of a backward pass, and how many bytes."""
    for ready, num_bytes in _buckets(profile, work.num_hosts):
        yield ready, sent_bytes(num_bytes, work)


def _buckets(profile: StepProfile, num_hosts: int) -> Iterator[tuple[float, float]]:
    """Cut gradients into buckets, from the last parameter on, within parameters too.

    Yields:
        When each is ready, as a part of a backward pass; and its bytes.
    """
    full, ready, held = BUCKET_BYTES * num_hosts, 0.0, 0
    for size, at in zip(reversed(profile.gradient_bytes), reversed(profile.ready), strict=True):
        left = size
        while left:
            ready, taken = max(ready, at), min(left, full - held)
            held, left = held + taken, left - taken
            if held == full:
                yield ready, held
                ready, held = 0.0, 0
    if held:
        yield ready, held
