"""Serves ``init_process_group`` from the launcher's store.

With ``env://``, ``tcp://`` and an address of this host, or ``file://``, ranks rendezvous in the
unnamed file that the launcher holds. Nothing listens, so jobs with the same port do not collide, a
program may create groups at the same address one after the other, and a rank that will never join
is reported at once. Invariant: only if all ranks can be workers of this job. torch serves all
others: processes that a worker starts, groups with more ranks than workers, another host's address.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qsl, urlparse

from unisono.errors import MismatchError, PeerLostError
from unisono.runtime.launch.job import ADDRESS
from unisono.runtime.workers.context import context
from unisono.runtime.workers.gathering import Gathering
from unisono.runtime.workers.launcher_messages import IN_INIT, MakesGroup
from unisono.runtime.workers.meeting_point import Departure
from unisono.runtime.workers.rendezvous import prefixed
from unisono.runtime.workers.shown_wait import ShownWait
from unisono.runtime.workers.supervisor import LauncherLink

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store


# Names of this host in programs, besides its host name; torch serves its other addresses.
_LOCAL_NAMES = ("localhost", ADDRESS, "::1", "0.0.0.0")
_ENDED = (Departure.FINISHED, Departure.FAILED)  # a worker that was lost is replaced

Handler = Callable[..., Iterator[tuple[Any, int, int]]]


@dataclass(frozen=True, slots=True)
class GroupRequest:
    """A program's request to torch."""

    place: str  # where ranks rendezvous, in words; ranks with another place wait for others
    rank: int  # the rank in the group that this worker requests
    world_size: int  # the number of ranks in the group


def group_request(url: str, environ: Mapping[str, str]) -> GroupRequest | None:
    """Parse a program's request to torch (``env://?rank=0``); None if torch must handle it."""
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
        # Something is missing or not a number: torch reports it.
        return None
    if not place or rank < 0 or world_size < 1:
        return None
    if rank >= world_size:
        raise ValueError(
            f"`rank` must be below `world_size`, but is {rank} of {world_size}: pass neither to "
            "`init_process_group`, or both as RANK and WORLD_SIZE say."
        )
    return GroupRequest(place, rank, world_size)


def _at_port(host: str | None, port: int | None) -> str:
    is_here = host in (*_LOCAL_NAMES, socket.gethostname())
    return f"port {port}" if is_here and port is not None and 0 <= port < 2**16 else ""


def meeting_in_launchers_store(handlers: Mapping[str, Handler]) -> dict[str, Handler]:
    """Return torch's functions by scheme, with ours for those that the launcher's store serves."""
    return {
        **handlers,
        **{scheme: _in_store(handlers[scheme]) for scheme in ("env", "tcp", "file")},
    }


def _in_store(torchs_own: Handler) -> Handler:
    from torch.distributed.constants import default_pg_timeout

    def meet(
        url: str, timeout: timedelta = default_pg_timeout, **options: Any
    ) -> Iterator[tuple[Any, int, int]]:
        link, wanted = context().launcher, None
        if link is not None and link.ranks_of_host:
            link.notify(MakesGroup())
            # The store at MASTER_ADDR outlives this start of the hosts.
            name = context().rendezvous().token
            for store, rank, world_size in torchs_own(url, timeout=timeout, **options):
                yield prefixed(name, store), rank, world_size
            return
        if link is not None:
            wanted = group_request(url, os.environ)
        if link is None or wanted is None or wanted.world_size > link.world.world_size:
            yield from torchs_own(url, timeout=timeout, **options)
            return
        store = _gathered(link, wanted, timeout.total_seconds())
        yield store, wanted.rank, wanted.world_size

    return meet


def _gathered(link: LauncherLink, wanted: GroupRequest, timeout_s: float) -> Store:
    """Wait for the ranks of this worker's n-th group here; return the group's part of the store."""
    where = f"`init_process_group` ({wanted.place})"
    me, everybody = link.world.rank, set(range(link.world.world_size))
    base, shown = context().rendezvous().store, ShownWait()
    number = base.add(f"{wanted.place}/arrivals of {wanted.rank}", 1)
    store = prefixed(f"{wanted.place}/{number}", base)

    def check_sizes(heard: Mapping[int, Any]) -> None:
        for worker, world_size in heard.values():
            if world_size != wanted.world_size:
                raise MismatchError(
                    f"all ranks must come to {where} with the same `world_size`, but worker "
                    f"{worker} says {world_size} and worker {me} says {wanted.world_size}: pass "
                    f'`world_size=int(os.environ["WORLD_SIZE"])`, or nothing.'
                )

    def look(heard: Mapping[int, Any], missing: Sequence[int], waited_s: float) -> None:
        """Raise if the group can never be complete."""
        shown.report_if_due(waited_s, lambda: IN_INIT)
        check_sizes(heard)
        workers = {worker for worker, _ in heard.values()}
        ended = {one for one in everybody if link.control.departure(one) in _ENDED}
        if ended & workers or (ended and len(everybody - workers - ended) < len(missing)):
            lost = min(ended & workers or ended)
            raise PeerLostError(
                f"all {wanted.world_size} ranks must come to {where}, but worker {lost} has ended, "
                f"so that not all of them ever will: make the same calls on every worker.",
                rank=lost,
            )

    if wanted.world_size > 1:
        link.notify(MakesGroup())
    gathering = Gathering(
        *(store, wanted.rank, wanted.world_size),
        where=where,
        timeout_s=timeout_s,
        check=look,
        advice="look at what the other workers do; every rank must call it.",
        speaks=False,
    )
    with closing(shown):
        came = gathering.gather("worker", [me, wanted.world_size])
    check_sizes(dict(enumerate(came)))
    return prefixed("group", store)
