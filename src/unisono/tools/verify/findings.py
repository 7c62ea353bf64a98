"""Findings, cause first: the exit status, the JSON, and a line for each check: ✓ ! ✗ ?."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from unisono.runtime.notices import can_show, shown_lines

OK, WARNING, WRONG, UNKNOWN = VERDICTS = "ok", "warning", "wrong", "unknown"
_MARKS = "[green]✓[/]", "[yellow]![/]", "[red]✗[/]", "[yellow]?[/]"
_PLAIN = "ok", "!", "WRONG", "?"


@dataclass(frozen=True, slots=True)
class Finding:
    """The answer to one question."""

    check: str  # the name of the question, such as `memory`
    verdict: str  # one of `VERDICTS`; a warning: it works, but not well
    evidence: str  # the observation, in a sentence
    remedy: str = ""  # what to do; empty if nothing is


def print_findings(console: Console, findings: Iterable[Finding]) -> None:
    """Print a line for each finding: a mark, the check, the evidence, what to do."""
    marks, arrow = (_MARKS, "→") if can_show("✓✗→", console.encoding) else (_PLAIN, "->")
    table = Table(box=None, show_header=False, padding=(0, 1, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    before = ""
    for one in findings:
        text = escape(shown_lines(one.evidence))
        text, before = ("as above" if text == before else text), text
        if one.remedy:
            text += f"\n{arrow} {escape(shown_lines(one.remedy))}"
        table.add_row(marks[VERDICTS.index(one.verdict)], one.check, text)
    console.print(table)


EQUAL, DIFFERENT, NOT_VERIFIED = 0, 1, 2

# What to do about each mistake. A mistake that causes others comes before them.
GRADIENT_CHECKS = {
    "clip-before-average": "Average first, then clip: call `clip_grad_norm_` after the gradients "
    "have been averaged, so that all ranks clip by the same norm.",
    "accumulation-not-synced": "Leave `no_sync` for the last pass before `optimizer.step()`, "
    "forward and backward both, or average what has been accumulated, once, before the step.",
    "gradients-not-averaged": "Wrap the model in `DistributedDataParallel` and call the wrapper, "
    "or `all_reduce` every gradient and divide by the world size before `optimizer.step()`.",
    "parameter-not-averaged": "Average the gradients of all parameters that the optimizer updates: "
    "put all modules into the one that is wrapped in `DistributedDataParallel`.",
    "gradient-times-n": "Divide the sum of gradients by the world size (or use `ReduceOp.AVG`), "
    "once; DDP does so by itself.",
    "gradient-over-n": "Divide by the world size once: DDP averages already, so neither the loss "
    "nor the gradients are to be divided again.",
    "mean-of-means": "Give all ranks the same number of samples, or weigh: multiply a rank's mean "
    "loss by `its samples · world size / all samples` before `backward()`.",
    "weights-of-tokens": "Sum the loss over tokens and divide by the number of tokens on all ranks "
    "(`all_reduce` it), times the world size where gradients are averaged.",
}
CHECKS = {
    "split-differs": "Split with a fixed seed that is the same on all ranks, for example "
    "`random_split(..., generator=torch.Generator().manual_seed(0))`.",
    "samples-same-on-all-ranks": "Give the DataLoader a `DistributedSampler` (and "
    "`shuffle=False`), or take every N-th sample by rank.",
    "samples-lost": "Spread the remainder: take `indices[rank::world_size]` instead of equal "
    "blocks rounded down, or use a `DistributedSampler`.",
    "epoch-order-fixed": "Call `sampler.set_epoch(epoch)` at the beginning of each epoch.",
    **GRADIENT_CHECKS,
    "learning-rate-scaled": "Choose the learning rate for the global batch, and leave it alone "
    "when the number of ranks changes; scale it only where the global batch grows with them.",
    "schedule-too-fast": "Step the schedule once for each step of the optimizer, and count its "
    "length in steps of the global batch: `len(loader)` on a rank is that already.",
    "randomness-same-on-all-ranks": "Seed each rank differently once the model is created: "
    "`torch.manual_seed(seed + rank)`.",
    "buffers-differ": "Let DDP broadcast them (`broadcast_buffers=True`, its default), use "
    "`SyncBatchNorm`, or average them before you evaluate or save.",
    "parameters-differ": "Begin with the same weights: seed before the model is created, load or "
    "`broadcast` those of rank 0 (DDP does), and let only averaged gradients change them.",
    "evaluation-partial": "`all_reduce` sums and counts before dividing, or evaluate all of it on "
    "one rank.",
    "evaluation-counts-twice": "Evaluate `indices[rank::world_size]` without padding, for example "
    "with `unisono.distributed.DistributedSampler(..., exact=True)`.",
}
CAUSES_FIRST = tuple(CHECKS)
_WORST_FIRST = (WRONG, UNKNOWN, OK)


@dataclass(frozen=True, slots=True)
class Verdict:
    """The answer to all questions about a program."""

    world_sizes: tuple[int, ...]  # the numbers of ranks on which the program ran
    findings: Sequence[Finding] = ()  # cause first
    trouble: str = ""  # why a run did not end well; empty if all did
    interrupted_by: int | None = None  # the signal that the user ended it with
    is_exact: bool = False  # bits were compared

    @property
    def status(self) -> int:
        """The exit status: 0 equal, 1 different, 2 could not be verified."""
        verdicts = {finding.verdict for finding in self.findings}
        if WRONG in verdicts:
            return DIFFERENT
        # Equal only as far as it ran does not count.
        return EQUAL if verdicts == {OK} and not self.trouble else NOT_VERIFIED


def ok(check: str, evidence: str) -> Finding:
    """Return that no mistake was found."""
    return Finding(check, OK, evidence)


def wrong(check: str, evidence: str, remedy: str = "") -> Finding:
    """Return a mistake, with the check's remedy or another one."""
    return Finding(check, WRONG, evidence, remedy or CHECKS[check])


def other_end(world_size: int, num_steps: int, num_alone: int) -> Finding:
    """Return that ranks end after another number of steps than one rank."""
    told = f"{world_size} ranks took {num_steps} steps, and one rank {num_alone}."
    remedy = "Let the number of steps follow from the data and the epochs, not from that of ranks."
    return wrong("samples-lost", told, remedy)


def unknown(check: str, evidence: str, remedy: str = "") -> Finding:
    """Return why a check could not be made."""
    return Finding(check, UNKNOWN, evidence, remedy)


def around_mistake(
    mistake: Finding, checks: Sequence[str], *, were_well: bool = False
) -> list[Finding]:
    """Return findings on all checks around one mistake; later ones are unknown or were well."""
    at = checks.index(mistake.check)
    hidden = f"Hidden behind `{mistake.check}`."
    before = [ok(check, "No sign of it.") for check in checks[:at]]
    after = [
        ok(check, "No sign of it.") if were_well else unknown(check, hidden)
        for check in checks[at + 1 :]
    ]
    return [*before, mistake, *after]


def in_order(
    findings: Iterable[Finding], checks: Sequence[str] = CAUSES_FIRST
) -> tuple[Finding, ...]:
    """Return the cause first, then what follows from it, marked as such."""
    first, *others = sorted(
        findings, key=lambda one: (_WORST_FIRST.index(one.verdict), checks.index(one.check))
    )
    told = f"Follows from `{first.check}`, most likely. "
    return first, *(
        replace(one, evidence=told + one.evidence) if one.verdict == WRONG else one
        for one in others
    )


def summary(program: str, verdict: Verdict) -> str:
    """Return all findings in one sentence."""
    findings = verdict.findings
    *most, last = map(str, verdict.world_sizes)
    sizes = f"{', '.join(most)} and {last}" if most else last
    resumes = bool(findings) and findings[0].check.startswith("resume-")
    what = "resuming" if resumes else f"training on {sizes} ranks"
    mistakes = [finding.check for finding in findings if finding.verdict == WRONG]
    num_open = [finding.verdict for finding in findings].count(UNKNOWN)
    if mistakes:
        return f"{program}: {what} does not give the same result; the cause is `{mistakes[0]}`."
    if num_open:
        count = f"{num_open} of {len(findings)}"
        return f"{program}: no mistake found, but {count} checks could not be made."
    how = "bit for bit" if verdict.is_exact else "but for rounding"
    return f"{program}: {what} gives the same result, {how}."
