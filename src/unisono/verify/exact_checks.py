"""Are all numbers of a Unisono program the same, bit for bit, on 1, 2, … workers? Pure.

The first difference is named. Within a step the order is that of causes: the samples of a shard,
its gradients, then buffers and parameters after the update.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from unisono.verdicts import Finding
from unisono.verify.findings import CAUSES_FIRST, around_mistake, ok, unknown, wrong
from unisono.verify.raw_trace import RawTrace

Digests = Mapping[str, str]
ExactRun = dict[tuple[int, str, int], Digests]
"""What one run computed: digests by step, kind, and shard or, of the model, worker."""

_OF_SHARDS = {
    "samples": (
        "samples-lost",
        "on {workers} workers it has other samples than on one; what the dataset returns depends "
        "on the worker.",
        "Let a sample depend on its index and on the default generators alone: not on "
        "RANK, the time, the process, or a generator of its own.",
    ),
    "gradients": (
        "gradients-not-averaged",
        "the gradient of `{name}` on {workers} workers differs from that on one, from the same "
        "samples, parameters and buffers.",
        "Look in the forward pass and the loss for what each worker has for itself: "
        "attributes that change from call to call, generators of your own, RANK.",
    ),
}
_OF_WORKERS = {"buffers": "buffers-differ", "parameters": "parameters-differ"}


def exact_run(traces: Sequence[RawTrace]) -> ExactRun:
    """Gather what the workers of a run recorded; shards are computed by one each."""
    return {
        (event["step"], kind, event.get("shard", trace.rank)): digests
        for trace in traces
        for event in trace.of("shard-bits", "step-bits")
        for kind, digests in event["bits"].items()
    }


def differing(ours: Digests, theirs: Digests) -> str:
    """Name the first of ours that is not the same there; empty if all are."""
    return next((name for name in ours if theirs.get(name) != ours[name]), "")


def check_exact(runs: Mapping[int, ExactRun]) -> list[Finding]:
    """Compare every run with that on one worker.

    Args:
        runs: by their numbers of workers, ascending.
    """
    base, *_ = runs.values()
    steps = sorted(set.intersection(*(_steps(run) for run in runs.values())))
    if not steps:
        return [unknown(check, "The runs have no step in common.") for check in CAUSES_FIRST]
    for step in steps:
        for num_workers, run in list(runs.items())[1:]:
            for found in _differences(base, run, step, num_workers):
                return around_mistake(found, CAUSES_FIRST)
    num_shards = len({place for _, kind, place in base if kind == "gradients"})
    told = (
        f"Samples and gradients of {num_shards} shards, parameters and buffers have the same bits "
        f"on {', '.join(map(str, runs))} workers in {len(steps)} steps."
    )
    return [ok(check, told) for check in CAUSES_FIRST]


def _steps(run: ExactRun) -> set[int]:
    return {step for step, kind, _ in run if kind == "parameters"}


def _differences(base: ExactRun, run: ExactRun, step: int, num_workers: int) -> Iterator[Finding]:
    """Compare a step, cause first."""
    for kind, (check, told, remedy) in _OF_SHARDS.items():
        for shard in sorted(place for at, of, place in base if (at, of) == (step, kind)):
            place = step, kind, shard
            if name := differing(base[place], run.get(place, {})):
                told = told.format(name=name, workers=num_workers)
                yield wrong(check, f"Step {step}, shard {shard}: {told}", remedy)
    for kind, check in _OF_WORKERS.items():
        for rank in range(num_workers):
            theirs = run.get((step, kind, rank))
            if theirs is not None and (name := differing(base[step, kind, 0], theirs)):
                yield wrong(
                    check,
                    f"Step {step}: after the update worker {rank} of {num_workers} has other "
                    f"{kind} than one worker; the first is `{name}`.",
                    "Nothing but the optimizer may write to parameters, and nothing but the "
                    "forward pass to buffers: look for code that does so depending on RANK.",
                )
