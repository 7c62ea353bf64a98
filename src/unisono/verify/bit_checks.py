"""Has a run the bits that another one had? Pure.

*On 1, 2, … workers*, where a program trains with Unisono: the first difference is named. Within a
step the order is that of causes: the samples of a shard, its gradients, then buffers and parameters
after the update.

*After a stop*: the resumed run begins where its first parameters, or its step number, are those of
the undisturbed run; from there on every step must be the same.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from unisono.verdicts import Finding
from unisono.verify.findings import CAUSES_FIRST, around_mistake, ok, unknown, wrong
from unisono.verify.reading import RawTrace

Digests = Mapping[str, str]
ExactRun = dict[tuple[int, str, int], Digests]
"""What one run computed: digests by step, kind, and shard or, of the model, worker."""

KINDS = {
    "resume-samples": "Save where the epoch stands, and skip what has been read: the sampler's "
    "epoch and the batch in it.",
    "resume-parameters": "Save the model's `state_dict()` and load it before the first step.",
    "resume-optimizer": "Save and load the optimizer's `state_dict()`, and the schedule's.",
    "resume-generators": "Save and load the states of torch's, numpy's and Python's generators.",
}
WORKS = "resume-check-works"


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


def _differing(ours: Digests, theirs: Digests) -> str:
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
            if name := _differing(base[place], run.get(place, {})):
                told = told.format(name=name, workers=num_workers)
                yield wrong(check, f"Step {step}, shard {shard}: {told}", remedy)
    for kind, check in _OF_WORKERS.items():
        for rank in range(num_workers):
            theirs = run.get((step, kind, rank))
            if theirs is not None and (name := _differing(base[step, kind, 0], theirs)):
                yield wrong(
                    check,
                    f"Step {step}: after the update worker {rank} of {num_workers} has other "
                    f"{kind} than one worker; the first is `{name}`.",
                    "Nothing but the optimizer may write to parameters, and nothing but the "
                    "forward pass to buffers: look for code that does so depending on RANK.",
                )


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One step of one rank, as digests."""

    number: int | None = None  # of the step, where the program says it; None: it does not
    before: Digests | None = None  # the parameters when it began; None: not known
    samples: tuple[str, ...] = ()  # what the model was given
    # after the step, by kind: parameters, optimizer, generators
    after: Mapping[str, Digests] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Resumption:
    """A run that was stopped and started again."""

    stopped_after: int  # how many steps
    first: int | None = None  # which step of the undisturbed run it began with; None: not known
    # what differs first of each kind, in words; empty: nothing
    differences: Mapping[str, str] = field(default_factory=dict)
    num_compared: int = 0  # how many steps


def step_records(trace: RawTrace) -> list[StepRecord]:
    """Gather what one rank recorded of each step."""
    records: list[StepRecord] = []
    before: Digests | None = None
    samples: list[str] = []
    for event in trace.events:
        match event["t"]:
            case "state":
                before = event["parameters"]
            case "f" if event["grad"] and event["training"]:
                samples += event["rows"]
            case "shard-bits" if "samples" in event["bits"]:
                samples += [f"{event['shard']}: {event['bits']['samples']['the batch']}"]
            case "step-bits":
                records.append(StepRecord(event["step"], before, tuple(samples), event["bits"]))
                before, samples = None, []
    return records


def compare(
    undisturbed: Sequence[Sequence[StepRecord]],
    resumed: Sequence[Sequence[StepRecord]],
    stopped_after: int,
) -> Resumption:
    """Compare all ranks of two runs, each as its steps.

    Args:
        undisturbed, resumed: by rank.
        stopped_after: how many steps there were before the stop.
    """
    if not all(resumed) or not all(undisturbed):
        return Resumption(stopped_after)
    first = _first(undisturbed[0], resumed[0][0], stopped_after)
    if first is None:
        told = "it begins with parameters that the undisturbed run never had"
        return Resumption(stopped_after, None, {"resume-parameters": told})
    differences: dict[str, str] = {}
    num_compared = min(len(resumed[0]), len(undisturbed[0]) - first)
    for at in range(num_compared):
        for rank, (ours, theirs) in enumerate(zip(undisturbed, resumed, strict=True)):
            if first + at < len(ours) and at < len(theirs):
                for check, told in _step_differences(ours[first + at], theirs[at]).items():
                    differences.setdefault(check, f"step {first + at}, rank {rank}: {told}")
    return Resumption(stopped_after, first, differences, num_compared)


def _first(undisturbed: Sequence[StepRecord], begun: StepRecord, stopped_after: int) -> int | None:
    """Find the step with which a run begins; the last that it can be."""
    for at in reversed(range(min(stopped_after + 1, len(undisturbed)))):
        step = undisturbed[at]
        if begun.number is not None:
            if step.number == begun.number:
                return at
        elif begun.before is not None and step.before == begun.before:
            return at
    return None


def _step_differences(ours: StepRecord, theirs: StepRecord) -> dict[str, str]:
    found = {}
    if ours.samples != theirs.samples:
        found["resume-samples"] = "the model is given other samples"
    for check in KINDS:
        kind = check.removeprefix("resume-")
        if name := _differing(ours.after.get(kind, {}), theirs.after.get(kind, {})):
            found[check] = f"`{name}` has other bits"
    return found


def check_resumptions(resumptions: Sequence[Resumption], broken: Resumption) -> list[Finding]:
    """Judge all stops.

    Args:
        resumptions: of the program as it is.
        broken: one that was damaged on purpose, and must be found different.
    """
    if not any(r.first or r.differences for r in resumptions):
        why = "After each stop the program began again from its first step: nothing was resumed."
        remedy = "Verify a program that saves checkpoints and resumes; `--steps` runs it longer."
        return [unknown(check, why, remedy) for check in (*KINDS, WORKS)]
    findings = [_judge(check, resumptions, remedy) for check, remedy in KINDS.items()]
    if broken.differences:
        told = "; ".join(broken.differences.values())
        return [*findings, ok(WORKS, f"A resumed run that was damaged is found different: {told}.")]
    return [*findings, unknown(WORKS, "A resumed run that was damaged was not found different.")]


def _judge(check: str, resumptions: Sequence[Resumption], remedy: str) -> Finding:
    for one in resumptions:
        if check in one.differences:
            told = f"Stopped after {one.stopped_after} steps and resumed: {one.differences[check]}."
            return wrong(check, told, remedy)
    resumed = [one for one in resumptions if one.num_compared]
    if not resumed or any(one.first is None for one in resumptions):
        return unknown(check, "The resumed run took no step that could be compared.")
    stops = ", ".join(str(one.stopped_after) for one in resumed)
    firsts = ", ".join(str(one.first) for one in resumed)
    return ok(
        check,
        f"Stopped after {stops} steps, resumed at step {firsts}: the same bits from there on.",
    )
