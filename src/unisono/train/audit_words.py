"""How is what an audit found put into words? What must hold, was seen, is to do."""

from __future__ import annotations

from collections.abc import Sequence

from unisono.callbacks.callback import Audit
from unisono.errors import CorruptionError
from unisono.notices import listed
from unisono.plan.audit import SHARE_OF_TIME, Ruling, interval_for

_NAMES_AT_MOST = 3


def who(audit: Audit) -> str:
    """Name the workers that were wrong, such as "ranks 2 and 3 (host 1)"."""
    ranks = listed("rank", audit.wrong, " and ")
    return f"{ranks} ({listed('host', audit.hosts, ' and ')})" if audit.hosts else ranks


def what(names: Sequence[str], shards: Sequence[int] = ()) -> str:
    """Name what is wrong, such as "gradient of `fc.weight` in shards 2–3"."""
    first = list(names[:_NAMES_AT_MOST])
    more = len(names) - len(first)
    text = ", ".join(first) + (f" and {more} more" if more else "")
    if not shards:
        return text
    return f"{text} in {_shards(shards)}"


def how_ended(audit: Audit) -> str:
    """Say of a worker that was wrong how it has ended."""
    return f"was ended, as an audit found its {what(audit.names, audit.shards)} wrong"


def corrupt(audit: Audit, *, has_directory: bool) -> CorruptionError:
    """Make the error that every worker raises where nobody can replace the wrong ones."""
    return CorruptionError(
        f"all workers must compute the same bits, but the audit of step {audit.step} found what "
        f"{who(audit)} had wrong: {what(audit.names, audit.shards)}. Its "
        f"memory or processor is at fault: leave it out and start again; "
        f"{_resumed(has_directory)}",
        ranks=audit.wrong,
        step=audit.step,
        names=audit.names,
    )


def in_shared(audit: Audit, ranks: Sequence[int], *, has_changed: bool) -> str:
    """Say what is wrong in memory that workers share.

    Args:
        audit: what was found.
        ranks: of several hosts: the workers that share it.
        has_changed: whether it did while nobody updated it; else it is another than other hosts'.
    """
    hosts = listed("host", audit.hosts, " and ") if audit.hosts else ""
    where = f" on {hosts} ({listed('rank', ranks, ' and ')})" if hosts else ""
    must, seen = "not change before the update", "did"
    if not has_changed:
        must, seen = "be the same on all hosts", "was wrong"
    step = f"in step {audit.step}{where}: {what(audit.names)}"
    return f"memory that workers share must {must}, but {seen} {step}"


def changed(
    audit: Audit, ranks: Sequence[int], *, has_changed: bool, has_directory: bool
) -> CorruptionError:
    """Make the error that every worker raises where shared memory is wrong again.

    Args:
        audit, ranks, has_changed: as of :func:`in_shared`.
        has_directory: whether there are checkpoints.
    """
    return CorruptionError(
        f"{in_shared(audit, ranks, has_changed=has_changed)}. Memory is at fault: test it, and "
        f"start again elsewhere; {_resumed(has_directory)}",
        ranks=tuple(ranks),
        step=audit.step,
        names=audit.names,
    )


def undecided(
    audit: Audit, ruling: Ruling, ranks: Sequence[int], *, has_directory: bool
) -> CorruptionError:
    """Make the error that every worker raises where it cannot be told who is wrong."""
    where = f"{what(audit.names, audit.shards)}, in step {audit.step}"
    if ruling == "unrepeatable":
        message = (
            f"a shard must have the same bits whenever it is computed, but each of "
            f"{listed('rank', ranks)} has got others the second time: {where}. Most often the loss "
            f"depends on more than model, batch and the default generators (a clock, a counter, a "
            f"generator of its own): mend it, or leave `audit_every` out."
        )
    else:
        message = (
            f"all workers must compute the same bits, but {listed('rank', ranks, ' and ')} differ, "
            f"and it cannot be told which is wrong: {where}. Memory or a processor is at fault: "
            f"run with three workers, or elsewhere; {_resumed(has_directory)}"
        )
    return CorruptionError(message, step=audit.step, names=audit.names)


def cost(audit_s: float, step_s: float, every: int) -> str:
    """Say what audits cost, and with which interval they take at most 1 % of the time."""
    share = 100 * audit_s / (every * step_s)
    return (
        f"an audit takes {1000 * audit_s:.3g} ms beside a step of {1000 * step_s:.3g} ms: audits "
        f"take at most {100 * SHARE_OF_TIME:g} % of the time with "
        f"`audit_every={interval_for(audit_s, step_s)}` or more, and {share:.2g} % with {every}"
    )


def _resumed(has_directory: bool) -> str:
    if has_directory:
        return "the run goes on from its newest checkpoint, which was audited."
    return "with a `directory`, the run would go on from an audited checkpoint."


def _shards(shards: Sequence[int]) -> str:
    if len(shards) == 1:
        return f"shard {shards[0]}"
    is_run = list(shards) == list(range(shards[0], shards[-1] + 1))
    return f"shards {shards[0]}–{shards[-1]}" if is_run else listed("shard", shards)
