"""Are all numbers of a Unisono program the same, bit for bit, on 1, 2, … workers? Pure.

The first difference is named. Within a step the order is that of causes: the samples of a shard,
its gradients, then buffers and parameters after the update.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from unisono.verify.findings import CAUSES_FIRST, Finding, around_mistake, ok, unknown, wrong
from unisono.verify.raw_trace import RawTrace


@dataclass(slots=True)
class ExactRun:
    """What all workers of one run computed."""

    world_size: int  # how many there were
    # a digest of each shard's batch, by step and shard
    samples: dict[tuple[int, int], str] = field(default_factory=dict)
    # digests by step and shard, then by parameter
    gradients: dict[tuple[int, int], Mapping[str, str]] = field(default_factory=dict)
    # digests after each step, by name; one entry for each worker
    parameters: dict[int, list[Mapping[str, str]]] = field(default_factory=dict)
    buffers: dict[int, list[Mapping[str, str]]] = field(default_factory=dict)  # likewise


def exact_run(traces: Sequence[RawTrace]) -> ExactRun:
    """Gather what the workers of a run recorded; shards are computed by one each."""
    run = ExactRun(len(traces))
    for trace in traces:
        for event in trace.events:
            match event["t"]:
                case "shard-samples":
                    run.samples[event["step"], event["shard"]] = event["hash"]
                case "shard":
                    run.gradients[event["step"], event["shard"]] = event["gradients"]
                case "exact-step":
                    run.parameters.setdefault(event["step"], []).append(event["parameters"])
                    run.buffers.setdefault(event["step"], []).append(event["buffers"])
    return run


def check_exact(runs: Sequence[ExactRun]) -> list[Finding]:
    """Compare every run with the first one.

    Args:
        runs: in the order of their numbers of workers, the first with one.
    """
    sizes = ", ".join(str(run.world_size) for run in runs)
    steps = sorted(set.intersection(*(set(run.parameters) for run in runs)))
    if not steps or len(runs) < 2:
        why = "The runs have no step in common."
        return [unknown(check, why) for check in CAUSES_FIRST]
    difference = first_difference(runs, steps)
    num_shards = len({shard for _, shard in runs[0].gradients})
    told = (
        f"Samples and gradients of {num_shards} shards, parameters and buffers have the same bits "
        f"on {sizes} workers in {len(steps)} steps."
    )
    if difference is None:
        return [ok(check, told) for check in CAUSES_FIRST]
    return around_mistake(difference, CAUSES_FIRST)


def first_difference(runs: Sequence[ExactRun], steps: Sequence[int]) -> Finding | None:
    """Find the first difference of any run from the first run."""
    base = runs[0]
    for step in steps:
        for run in runs[1:]:
            found = _in_shards(base, run, step) or _in_state(base, run, step)
            if found is not None:
                return found
    return None


def _in_shards(base: ExactRun, run: ExactRun, step: int) -> Finding | None:
    """Look for the first difference in samples, then for that in gradients."""
    shards = sorted(shard for at, shard in base.samples if at == step)
    for shard in shards:
        if run.samples.get((step, shard)) != base.samples[step, shard]:
            return wrong(
                "samples-lost",
                f"Step {step}, shard {shard}: on {run.world_size} workers it has other samples "
                f"than on one; what the dataset returns depends on the worker.",
                "Let a sample depend on its index and on the default generators alone: not on "
                "RANK, the time, the process, or a generator of its own.",
            )
    for shard in shards:
        ours, theirs = base.gradients.get((step, shard)), run.gradients.get((step, shard))
        if ours is None or theirs is None:
            continue
        apart = [name for name in ours if theirs.get(name) != ours[name]]
        if apart:
            return wrong(
                "gradients-not-averaged",
                f"Step {step}, shard {shard}: the gradient of `{apart[0]}` on {run.world_size} "
                f"workers differs from that on one, from the same samples, parameters and "
                f"buffers.",
                "Look in the forward pass and the loss for what each worker has for itself: "
                "attributes that change from call to call, generators of your own, RANK.",
            )
    return None


def _in_state(base: ExactRun, run: ExactRun, step: int) -> Finding | None:
    for check, ours, theirs in (
        ("buffers-differ", base.buffers[step][0], run.buffers[step]),
        ("parameters-differ", base.parameters[step][0], run.parameters[step]),
    ):
        kind = check.partition("-")[0]
        for rank, of_worker in enumerate(theirs):
            for name in ours:
                if of_worker.get(name) != ours[name]:
                    return wrong(
                        check,
                        f"Step {step}: after the update worker {rank} of {run.world_size} has "
                        f"other {kind} than one worker; the first is `{name}`.",
                        "Nothing but the optimizer may write to parameters, and nothing but the "
                        "forward pass to buffers: look for code that does so depending on RANK.",
                    )
    return None
