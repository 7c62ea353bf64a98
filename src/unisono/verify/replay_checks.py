"""Does a resumed run have the bits of an undisturbed one? Pure.

The resumed run begins where its first parameters, or its step number, are those of the undisturbed
run; from there on every step must be the same.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from unisono.verdicts import Finding
from unisono.verify.exact_checks import Digests, differing
from unisono.verify.findings import ok, unknown, wrong
from unisono.verify.raw_trace import RawTrace

KINDS = {
    "resume-samples": "Save where the epoch stands, and skip what has been read: the sampler's "
    "epoch and the batch in it.",
    "resume-parameters": "Save the model's `state_dict()` and load it before the first step.",
    "resume-optimizer": "Save and load the optimizer's `state_dict()`, and the schedule's.",
    "resume-generators": "Save and load the states of torch's, numpy's and Python's generators.",
}
WORKS = "resume-check-works"


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
                for check, told in _differences(ours[first + at], theirs[at]).items():
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


def _differences(ours: StepRecord, theirs: StepRecord) -> dict[str, str]:
    found = {}
    if ours.samples != theirs.samples:
        found["resume-samples"] = "the model is given other samples"
    for check in KINDS:
        kind = check.removeprefix("resume-")
        if name := differing(ours.after.get(kind, {}), theirs.after.get(kind, {})):
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
