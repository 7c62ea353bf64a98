"""Inspects every rank of a job: is it in a collective, at a barrier, or in its own code?

A rank waits for others if Unisono's control block or the launcher says so, or if its first thread
does not compute and its stack is in a call of torch.distributed. A wait in C++ has no Python frame,
but its caller does::

    the sum of gradients of DDP     the innermost frame is autograd's
    handle.wait()                   the line shows it, and a collective was called before

An inspection takes 0.1 s, at most about 2 s, and does not change the processes.
"""

from __future__ import annotations

import linecache
import re
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace

from unisono.runtime.hangs.stacks import (
    AT_THE_END,
    Frame,
    Owner,
    Sample,
    Stack,
    sample,
    sample_in,
    user_frame,
)
from unisono.runtime.procfs import (
    ProcessStat,
    children,
    command_of,
    inspect_process,
    thread_time_ns,
)
from unisono.runtime.workers.control_block import ControlBlock
from unisono.runtime.workers.launcher_messages import IN_INIT
from unisono.runtime.workers.meeting_point import Departure

SUM_OF_GRADIENTS = "the sum of gradients"
_AUTOGRAD = "torch/autograd/graph.py"
_OUR_LOADER = "unisono/data/loader_processes.py"
_FETCHES = ("torch/utils/data/_utils/fetch.py", "unisono/data/fetch.py", "unisono/data/loader.py")
_DEBUGGERS = ("/bdb.py", "/pdb.py", "/pdbpp.py", "/ipdb/__main__.py", "/debugpy/")
_PEERS = re.compile(r" (?:to|from|among) ranks? ([\d, ]+)$")
_NUMBER_OF_STEP = re.compile(r" of step| \d+\.\d")  # of a step, or of one of its updates


@dataclass(frozen=True, slots=True)
class ProcessState:
    """The result of inspecting a process."""

    pid: int  # the process
    command: str = "python"  # its program's name
    sample: Sample = field(default_factory=Sample)  # its Python stack
    kernel: ProcessStat = field(default_factory=ProcessStat)  # its state in the kernel
    computes: bool = False  # it uses a processor
    source: str = ""  # the source text of its innermost frame's line, if it could be read

    @property
    def stack(self) -> Stack:
        """Its Python stack; empty if it could not be read."""
        return self.sample.stack


@dataclass(frozen=True, slots=True, kw_only=True)
class RankNotes:
    """What is known about a rank without inspecting its process."""

    step: int | None = None  # the step that it is in; None if there is no run
    meeting: str = ""  # the barrier of Unisono's workers where it waits; empty if it does not
    is_behind: bool = False  # others wait at a barrier that it has not reached
    shown_wait: str = ""  # the wait that it has reported to the launcher; empty if none
    call: str = ""  # a description of the last collective of torch.distributed that it called
    num_calls: int = 0  # the number of collectives that it has called


@dataclass(frozen=True, slots=True)
class RankState(RankNotes):
    """The result of inspecting a rank."""

    rank: int  # which one
    process: ProcessState  # its process
    children: tuple[ProcessState, ...] = ()  # its child processes


@dataclass(frozen=True, slots=True)
class Whereabouts:
    """Where a rank is."""

    rank: int  # which one
    name: str = ""  # of the collective or barrier where it waits; empty if it does not wait
    call: str = ""  # the collective with shape and dtype, as far as known
    site: Frame | None = None  # the user's current line
    is_meeting: bool = False  # it waits at a barrier of Unisono's workers

    @property
    def peers(self) -> frozenset[int]:
        """The ranks that take part in its call; empty if all do."""
        found = _PEERS.search(self.call)
        return frozenset(map(int, found[1].split(", "))) if found else frozenset()

    @property
    def sight(self) -> str:
        """The call that it is in, and where: ``` `barrier` (`train`, train.py:40) ```."""
        what = self.call or self.name
        what = what if what.startswith("the ") else f"`{what}`"
        return f"{what} ({self.site.words})" if self.site else what


def whereabouts(look: RankState) -> Whereabouts:
    """Return where a rank is."""
    stack, site = look.process.stack, user_frame(look.process.stack)
    here = Whereabouts(look.rank, site=site)
    if look.process.kernel.is_stopped:
        return here
    if look.meeting and not look.is_behind:
        return replace(here, name=meeting_in_words(look.meeting), is_meeting=True)
    found = _call_in(stack)
    if IN_INIT in (look.shown_wait, found):
        return replace(here, name=IN_INIT)
    if look.shown_wait:
        name = found or look.shown_wait.removeprefix("in ").partition("(")[0].strip()
        return replace(here, name=name, call=look.shown_wait)
    if look.process.computes:
        return here
    noted = look.call.partition(" ")[0]
    if found:
        # The record is of the call in the stack, or of all_gather within all_gather_object.
        is_of_call = noted and (found.startswith(noted) or noted.startswith(found))
        return replace(here, name=found, call=look.call if is_of_call else "")
    is_there = bool(stack) and stack[0].owner in (Owner.USER, Owner.TORCH)
    if noted and is_there and ".wait(" in look.process.source:
        return replace(here, name=noted, call=look.call)
    return here


def _call_in(stack: Stack) -> str:
    """Return the call of torch.distributed that a stack is in, as the program made it."""
    for frame in reversed(stack):
        if frame.is_in("torch/distributed/rendezvous.py"):
            return IN_INIT
        is_public = not frame.name.startswith(("_", "wrapper"))
        if frame.is_in("torch/distributed/distributed_c10d.py") and is_public:
            return frame.name
        if frame.is_in("torch/nn/parallel/distributed.py"):
            if frame.name == "__init__":
                return "DistributedDataParallel"
            if "sync" in frame.name:
                return "the broadcast of buffers"
        if frame.is_in("unisono/runtime/c10d/execution.py") and frame.name == "wait":
            is_ddps = any(one.is_in(_AUTOGRAD) for one in stack)
            return SUM_OF_GRADIENTS if is_ddps else "the end of a collective"
    if stack and stack[0].is_in(_AUTOGRAD):
        return SUM_OF_GRADIENTS
    return ""


def meeting_in_words(purpose: str) -> str:
    """Return a readable name for the purpose of a barrier of Unisono's workers."""
    kind = _NUMBER_OF_STEP.split(purpose)[0]
    known = {
        "gradients": SUM_OF_GRADIENTS,
        "sums": SUM_OF_GRADIENTS,
        "norm": "the norm of the gradients",
        "scale": "the scale of the loss",
        "update": "the update",
    }
    return known.get(kind, purpose) if kind != purpose else purpose


def place_in_words(process: ProcessState, children: Sequence[ProcessState] = ()) -> str:
    """Describe where a process is and what it does: ``is in `f`, a.py:1 (loading sample 3)``."""
    if not process.kernel.letter:
        return "has ended"
    if process.stack and process.stack[-1].name == AT_THE_END:
        return "has come to the end of its program, and waits for its threads and exit handlers"
    busy = list(filter(is_stuck, children))
    if busy and _waits_for_loader(process.stack) and not process.kernel.is_stopped:
        loaders = " and ".join(f"{child.pid}, which {place_in_words(child)}" for child in busy[:2])
        return f"waits for its loader process {loaders}"
    site = user_frame(process.stack)
    where = "is in code that cannot be seen" if site is None else f"is in {site.words}"
    remarks = "; ".join(_remarks(process))
    return f"{where} ({remarks})" if remarks else where


def _remarks(process: ProcessState) -> Iterator[str]:
    if number := sample_in(process.stack):
        yield f"loading sample{'s' * (',' in number)} {number}"
    kernel = process.kernel
    if kernel.tracer_pid:
        yield f"held by a debugger, process {kernel.tracer_pid}"
    elif kernel.is_stopped:
        yield f"stopped by a signal; `kill -CONT {process.pid}` continues it"
    elif any(debugger in frame.file for frame in process.stack for debugger in _DEBUGGERS):
        yield "at the prompt of a debugger"
    elif any(frame.is_in("unisono/runtime/workers/supervisor.py") for frame in process.stack):
        yield "waits for its launcher, which may be writing a checkpoint"
    elif process.computes:
        yield "computing"
    elif kernel.waits_for_disk:
        yield "waits for a disk or a network file system"
    if process.sample.trouble:
        yield process.sample.trouble


def _waits_for_loader(stack: Stack) -> bool:
    torchs = ("_next_data", "_get_data", "_try_get_data")
    return any(
        (frame.is_in("torch/utils/data/dataloader.py") and frame.name in torchs)
        or (frame.is_in(_OUR_LOADER) and frame.name == "take")
        for frame in stack
    )


def loader_part(stack: Stack) -> Stack | None:
    """Return a loader process's stack without its worker's frames; None if it is not a loader."""
    for count, frame in enumerate(stack):
        is_ours = frame.is_in(_OUR_LOADER) and frame.name == "_serve"
        if is_ours or frame.is_in("torch/utils/data/_utils/worker.py"):
            return stack[:count]
    return None


def is_stuck(process: ProcessState) -> bool:
    """Return whether a process is a loader at work, not one that waits for work."""
    own = loader_part(process.stack)
    if own is None:
        return False
    return process.kernel.is_stopped or any(frame.is_in(*_FETCHES) for frame in own)


_COMPUTES_ABOVE = 0.3  # of the time between two measurements
_CHILDREN_AT_MOST = 8


def inspect_ranks(pids: Mapping[int, int], notes: Mapping[int, RankNotes]) -> list[RankState]:
    """Inspect each rank, given its process and its notes on the control block."""
    below = {rank: children(pid)[:_CHILDREN_AT_MOST] for rank, pid in pids.items()}
    seen = _inspect_processes({*pids.values(), *(c for some in below.values() for c in some)})
    return [
        RankState(
            rank,
            seen[pid],
            tuple(seen[child] for child in below[rank]),
            **asdict(notes.get(rank, RankNotes())),
        )
        for rank, pid in sorted(pids.items())
    ]


def _inspect_processes(pids: Collection[int]) -> dict[int, ProcessState]:
    before = {pid: thread_time_ns(pid) for pid in pids}
    began_s = time.monotonic()
    samples = sample(pids)
    busy_ns = _COMPUTES_ABOVE * 1e9 * (time.monotonic() - began_s)
    found = {}
    for pid, seen in samples.items():
        kernel = inspect_process(pid)
        # A process that has run may be between two waits when it is inspected.
        computes = kernel.computes or thread_time_ns(pid) - before[pid] > busy_ns
        source = linecache.getline(seen.stack[0].file, seen.stack[0].line) if seen.stack else ""
        found[pid] = ProcessState(pid, command_of(pid), seen, kernel, computes, source)
    return found


def notes_of(control: ControlBlock, ranks: Collection[int]) -> dict[int, RankNotes]:
    """Return what ranks have written to their control block."""
    present = [rank for rank in ranks if control.departure(rank) is Departure.PRESENT]
    arrivals = {rank: control.lines[rank].arrivals for rank in present}
    counts, notes = set(arrivals.values()), {}
    for rank, mine in arrivals.items():
        _, wait = control.wait_of(rank)
        purpose = control.lines[rank].purposes[mine % 2].value.decode(errors="replace")
        num_calls, call = control.call_of(rank)
        waits = any(is_before(count, mine) for count in counts)
        notes[rank] = RankNotes(
            step=control.step_under_way(rank),
            meeting=(purpose.rstrip("\0 ") or "a meeting") if waits else "",
            is_behind=any(is_before(mine, count) for count in counts),
            shown_wait="" if wait is None else wait.decode(errors="replace"),
            call=call.decode(errors="replace"),
            num_calls=num_calls,
        )
    return notes


def is_before(count: int, other: int) -> bool:
    """Compare two numbers of arrivals, which are modulo 2³²."""
    return 0 < (other - count) % 2**32 < 2**31
