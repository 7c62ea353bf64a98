"""A look at every rank of a job: its stack, its loader processes, the kernel's word, its notes.

It takes a tenth of a second and about two at most, whatever state the processes are in, and changes
nothing in them.
"""

from __future__ import annotations

import linecache
import time
from collections.abc import Collection, Mapping
from dataclasses import asdict, replace

from unisono.hangs.kernel_view import children, command_of, look_at, thread_time_ns
from unisono.hangs.sampler import Sample, native_places, sample
from unisono.hangs.whereabouts import ProcessLook, RankLook, RankNotes
from unisono.workers.control_block import ControlBlock
from unisono.workers.meeting_point import Departure

_COMPUTES_ABOVE = 0.3  # of the time between two looks
_CHILDREN_AT_MOST = 16
_INTO_C_AT_MOST = 4


def look_at_ranks(
    pids: Mapping[int, int], notes: Mapping[int, RankNotes], *, in_c: bool = False
) -> list[RankLook]:
    """Look at each rank.

    Args:
        pids: its process, by rank.
        notes: what it has left on its control block, by rank.
        in_c: find out where those compute that others wait for, also in C, which holds them up.
    """
    below = {rank: children(pid)[:_CHILDREN_AT_MOST] for rank, pid in pids.items()}
    seen = _look_at_processes({*pids.values(), *(c for some in below.values() for c in some)})
    if in_c:
        late = [rank for rank, one in notes.items() if one.is_behind or one.step is None]
        _look_into_c(seen, [pids[rank] for rank in late if rank in pids])
    return [
        RankLook(
            rank,
            seen[pid],
            tuple(seen[child] for child in below[rank]),
            **asdict(notes.get(rank, RankNotes())),
        )
        for rank, pid in sorted(pids.items())
    ]


def _look_at_processes(pids: Collection[int]) -> dict[int, ProcessLook]:
    before = {pid: thread_time_ns(pid) for pid in pids}
    began_s = time.monotonic()
    samples = sample(pids)
    passed_ns = max(1.0, 1e9 * (time.monotonic() - began_s))
    shares = {pid: (thread_time_ns(pid) - before[pid]) / passed_ns for pid in pids}
    return {pid: _process(pid, samples[pid], shares[pid]) for pid in pids}


def _look_into_c(seen: dict[int, ProcessLook], pids: Collection[int]) -> None:
    """Add in which C function each process computes."""
    computing = [pid for pid in pids if seen[pid].may_be_held][:_INTO_C_AT_MOST]
    for pid, native in native_places(computing).items():
        seen[pid] = replace(seen[pid], sample=replace(seen[pid].sample, native=native))


def _process(pid: int, seen: Sample, share: float) -> ProcessLook:
    """Put together what was seen of a process, which has run for a share of the time."""
    kernel = look_at(pid)
    innermost = seen.stack[0] if seen.stack else None
    source = linecache.getline(innermost.file, innermost.line) if innermost else ""
    # One that has run may be between two waits when it is looked at.
    computes = kernel.computes or share > _COMPUTES_ABOVE
    return ProcessLook(pid, command_of(pid), seen, kernel, computes, source)


def notes_of(control: ControlBlock, ranks: Collection[int]) -> dict[int, RankNotes]:
    """Read what ranks have left on their control block."""
    present = [rank for rank in ranks if control.departure(rank) is Departure.PRESENT]
    arrivals = {rank: control.lines[rank].arrivals for rank in present}
    counts = set(arrivals.values())
    return {rank: _notes_of(control, rank, mine, counts) for rank, mine in arrivals.items()}


def _notes_of(control: ControlBlock, rank: int, mine: int, counts: Collection[int]) -> RankNotes:
    is_behind = any(is_before(mine, count) for count in counts)
    waits = any(is_before(count, mine) for count in counts)
    _, wait = control.wait_of(rank)
    purpose = control.lines[rank].purposes[mine % 2].value.decode(errors="replace").rstrip("\0 ")
    num_calls, call = control.call_of(rank)
    return RankNotes(
        step=control.step_under_way(rank),
        meeting=(purpose or "a meeting") if waits else "",
        is_behind=is_behind,
        shown_wait="" if wait is None else wait.decode(errors="replace"),
        call=call.decode(errors="replace"),
        num_calls=num_calls,
    )


def is_before(count: int, other: int) -> bool:
    """Compare two counts of meetings, which are modulo 2³²."""
    return 0 < (other - count) % 2**32 < 2**31
