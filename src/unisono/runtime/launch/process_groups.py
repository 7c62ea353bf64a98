"""Serves ``init_process_group`` from the launcher's store, and frees groups without deadlock.

With ``env://``, ``tcp://`` and an address of this host, or ``file://``, ranks meet in the nameless
file that the launcher holds. Nothing listens, so two jobs that name the same port do not meet, a
program may make groups one after the other at the same address, and a rank that will never come is
named at once. Invariant: only if all ranks can be workers of this job. torch serves the rest: a
process that a worker starts, a group with more ranks than workers, another host's address.

After ``destroy_process_group()`` a DDP model's reducer may hold the group's last reference. It
frees the group while it holds the GIL, and gloo then waits for a thread that may wait for the GIL
(torch 2.13). A group whose last reference is Python's is freed without the GIL, so one reference
is kept until the reducer and its logger are gone.
"""

from __future__ import annotations

import functools
import importlib
import json
import os
import socket
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qsl, urlparse

from unisono.errors import MismatchError, PeerLostError
from unisono.runtime.launch.job import ADDRESS
from unisono.runtime.notices import listed
from unisono.runtime.procfs import started_at
from unisono.runtime.workers.context import ShownWait, context
from unisono.runtime.workers.gathering import Gathering
from unisono.runtime.workers.launcher_messages import IN_INIT, MakesGroup
from unisono.runtime.workers.meeting_point import Departure
from unisono.runtime.workers.rendezvous import prefixed
from unisono.runtime.workers.supervisor import LauncherLink

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store


# What programs write for this host, beside its name; torch itself serves its other addresses.
_LOCAL_NAMES = ("localhost", ADDRESS, "::1", "0.0.0.0")
# So long a replacement of a lost worker may take to be forked.
_REPLACED_WITHIN_S = 5.0

Handler = Callable[..., Iterator[tuple[Any, int, int]]]


@dataclass(frozen=True, slots=True)
class GroupRequest:
    """What a program has asked torch for."""

    place: str  # where ranks meet, in words; whoever names another one waits for others
    rank: int  # which rank of the group this worker is to be
    world_size: int  # how many there are to be
    timeout_s: float  # how long to wait, in seconds


def group_request(url: str, timeout_s: float, environ: Mapping[str, str]) -> GroupRequest | None:
    """Read what a program has asked torch for (``env://?rank=0``); None if torch must answer."""
    parts = urlparse(url)
    given = dict(parse_qsl(parts.query))
    names = {"rank": "RANK", "world_size": "WORLD_SIZE"} if parts.scheme == "env" else {}
    values = {name: environ.get(variable, "") for name, variable in names.items()} | given
    try:
        rank, world_size = int(values["rank"]), int(values["world_size"])
        if parts.scheme == "file":
            place = f"file {parts.path}" if parts.path else ""
        elif parts.scheme == "env":
            place = _at_port(environ["MASTER_ADDR"], int(environ["MASTER_PORT"]))
        else:
            place = _at_port(parts.hostname, parts.port)
    except (KeyError, ValueError):
        # Something is missing or no number: torch says what.
        return None
    if not place or rank < 0 or world_size < 1:
        return None
    if rank >= world_size:
        raise ValueError(
            f"`rank` must be below `world_size`, but is {rank} of {world_size}: pass neither to "
            "`init_process_group`, or both as RANK and WORLD_SIZE say."
        )
    return GroupRequest(place, rank, world_size, timeout_s)


def _at_port(host: str | None, port: int | None) -> str:
    is_here = host in (*_LOCAL_NAMES, socket.gethostname())
    return f"port {port}" if is_here and port is not None and 0 <= port < 2**16 else ""


def use_launchers_store() -> None:
    """Have torch's rendezvous take the launcher's store, in this process."""
    import torch.distributed

    if not torch.distributed.is_available():
        return
    # `torch.distributed.rendezvous` is the function of that name, so not by attribute.
    module = importlib.import_module("torch.distributed.rendezvous")
    handlers: dict[str, Handler] = module._rendezvous_handlers
    for scheme in ("env", "tcp", "file"):
        handlers[scheme] = _in_store(handlers[scheme], module.default_pg_timeout)


def _in_store(torchs_own: Handler, default_timeout: timedelta) -> Handler:
    def meet(
        url: str, timeout: timedelta = default_timeout, **options: Any
    ) -> Iterator[tuple[Any, int, int]]:
        link, timeout_s = context().launcher, timeout.total_seconds()
        if link is not None and link.ranks_of_host:
            link.tell(MakesGroup())
            yield from torchs_own(url, timeout=timeout, **options)
            return
        wanted = None if link is None else group_request(url, timeout_s, os.environ)
        if link is None or wanted is None or wanted.world_size > link.world.world_size:
            yield from torchs_own(url, timeout=timeout, **options)
            return
        yield _Attempt(link, wanted).gather(), wanted.rank, wanted.world_size
        raise RuntimeError(f"ranks must meet anew for another group, not again by {url!r}.")

    return meet


class _Attempt:
    """A worker's attempt to make a group with others. Final.

    It has come to the n-th group of its rank at a place, and waits for those who come to theirs.
    """

    def __init__(self, link: LauncherLink, wanted: GroupRequest) -> None:
        self._link, self._wanted = link, wanted
        self._worker = link.world.rank
        self._base = context().rendezvous().store
        self._number = self._base.add(f"{wanted.place}/arrivals of {wanted.rank}", 1)
        self._shown = ShownWait()

    def gather(self) -> Store:
        """Wait for the others; return the part of the launcher's store that is the group's."""
        wanted, place = self._wanted, f"waits/{self._worker}"
        if wanted.world_size > 1:
            self._link.tell(MakesGroup())
        store = self._group_store(wanted.place, self._number)
        gathering = Gathering(
            *(store, wanted.rank, wanted.world_size),
            where=f"`init_process_group` ({wanted.place})",
            timeout_s=wanted.timeout_s,
            look=self._look,
            advice="look what the other workers do; every rank must call it.",
            speaks=False,
        )
        self._base.set(place, json.dumps([wanted.place, self._number, wanted.world_size]))
        try:
            with closing(self._shown):
                came = gathering.gather("worker", [self._worker, wanted.world_size])
        finally:
            self._base.set(place, "null")
        self._check_sizes(dict(enumerate(came)))
        return prefixed("group", store)

    def _group_store(self, place: str, number: int) -> Store:
        return prefixed(f"{place}/{number}", self._base)

    def _look(self, heard: Mapping[int, Any], missing: Sequence[int], waited_s: float) -> None:
        """Refuse to wait for what can never be."""
        self._shown.look(waited_s, lambda: IN_INIT)
        self._check_sizes(heard)
        self._check_rank()
        workers = {worker for worker, _ in heard.values()}
        ended = {
            one for one in range(self._link.world.world_size) if self._has_ended(one, waited_s)
        }
        idle = self._link.world.world_size - len(workers | ended)
        if ended and (ended & workers or idle < len(missing)):
            lost = min(ended & workers or ended)
            raise PeerLostError(
                f"all {self._wanted.world_size} ranks must come to `init_process_group` "
                f"({self._wanted.place}), but worker {lost} has ended, so that not all of them "
                f"ever will: make the same calls on every worker.",
                rank=lost,
            )
        self._check_others(ended)

    def _has_ended(self, worker: int, waited_s: float) -> bool:
        how = self._link.control.departure(worker)
        if how is not Departure.LOST:
            return how is not Departure.PRESENT
        pid, started = self._link.control.lines[worker].process  # 0: it was gone at once
        return waited_s >= _REPLACED_WITHIN_S and started_at(pid) != started

    def _check_sizes(self, heard: Mapping[int, Any]) -> None:
        for worker, world_size in heard.values():
            if world_size != self._wanted.world_size:
                raise MismatchError(
                    f"all ranks must come to `init_process_group` ({self._wanted.place}) with the "
                    f"same `world_size`, but worker {worker} says {world_size} and worker "
                    f"{self._worker} says {self._wanted.world_size}: pass "
                    f'`world_size=int(os.environ["WORLD_SIZE"])`, or nothing.'
                )

    def _check_rank(self) -> None:
        """Refuse another worker of this rank, which has come to the group before or after this."""
        wanted = self._wanted
        for number in (self._number - 1, self._number + 1):
            store = self._group_store(wanted.place, number)
            if not store.check([f"worker/{wanted.rank}"]):
                continue
            other, world_size = json.loads(store.get(f"worker/{wanted.rank}"))
            first, size = min((number, world_size), (self._number, wanted.world_size))
            is_whole = self._is_whole(wanted.place, first, size)
            if other != self._worker and not is_whole:
                raise MismatchError(
                    f"each rank must come to `init_process_group` ({wanted.place}) once, but "
                    f"workers {min(other, self._worker)} and {max(other, self._worker)} both say "
                    f"that they are rank {wanted.rank}: pass "
                    f'`rank=int(os.environ["RANK"])`, or nothing.'
                )

    def _check_others(self, ended: set[int]) -> None:
        """Refuse to wait where all wait for each other at different places."""
        waits: dict[tuple[str, int, int], list[int]] = {}
        for worker in set(range(self._link.world.world_size)) - ended:
            key = f"waits/{worker}"
            where = json.loads(self._base.get(key)) if self._base.check([key]) else None
            if where is None:
                return
            waits.setdefault(tuple(where), []).append(worker)
        if len(waits) == 1 or any(self._is_whole(*where) for where in waits):
            return
        places = "; ".join(
            f"{listed('worker', workers)} at {place} for {size} ranks"
            for (place, _, size), workers in waits.items()
        )
        raise MismatchError(
            f"all ranks of a group must come to `init_process_group` at one place, but they wait "
            f"for each other apart: {places}. Use the same `init_method` and `world_size` on every "
            f"worker."
        )

    def _is_whole(self, place: str, number: int, world_size: int) -> bool:
        keys = [f"worker/{rank}" for rank in range(world_size)]
        return self._group_store(place, number).check(keys)


def free_group_last(model: Any) -> None:
    """Keep a DDP model's group until its reducer is freed."""
    for holder in (model.reducer, model.logger):
        weakref.finalize(holder, _let_go, model.process_group).atexit = False


def free_groups_of_torchs_ddp_last() -> None:
    """Do :func:`free_group_last` for each DDP model of torch's that this process makes."""
    from torch.nn.parallel import DistributedDataParallel

    ddp: Any = DistributedDataParallel
    make_reducer = ddp._ddp_init_helper

    @functools.wraps(make_reducer)
    def make_reducer_and_keep_group(self: Any, *args: Any, **kwargs: Any) -> None:
        make_reducer(self, *args, **kwargs)
        free_group_last(self)

    ddp._ddp_init_helper = make_reducer_and_keep_group


def _let_go(group: object) -> None:
    """Drop a reference, at the end of this call."""
