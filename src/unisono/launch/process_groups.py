"""How does ``init_process_group`` find the job's store? torch's rendezvous asks the launcher.

With ``env://`` or ``tcp://`` and an address of this host, or ``file://``, each worker asks the
launcher, waits until all ranks have come, and gets the launcher's store (for a file, the file's).
A program may name any port: two jobs that name the same one do not meet.

Invariant: only if all ranks can be workers of this job. torch itself serves a process that a
worker starts, a group with more ranks than workers, and another host's address.
"""

from __future__ import annotations

import importlib
import os
import signal
import socket
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from typing import Any, NoReturn
from urllib.parse import parse_qsl, urlparse

from unisono.launch.environment import ADDRESS
from unisono.workers.context import context
from unisono.workers.launcher_messages import GroupRequest
from unisono.workers.lifeline import die_with

_LOCAL_NAMES = ("localhost", ADDRESS, "::1")


Handler = Callable[..., Iterator[tuple[Any, int, int]]]


def group_request(
    url: str,
    timeout_s: float,
    environ: Mapping[str, str],
    is_this_host: Callable[[str], bool],
) -> GroupRequest | None:
    """Read what a program has asked torch for; None if torch itself must answer.

    Args:
        url: what torch calls the handler with, such as ``env://?rank=0&world_size=2``.
        timeout_s: how long the rank waits for the others, in seconds.
        environ: the environment variables.
        is_this_host: whether a name or address is this machine's.

    Raises:
        ValueError: there is no such rank.
    """
    parts = urlparse(url)
    given = dict(parse_qsl(parts.query))
    names = {"rank": "RANK", "world_size": "WORLD_SIZE"} if parts.scheme == "env" else {}
    values = {name: environ.get(variable, "") for name, variable in names.items()} | given
    try:
        rank, world_size = int(values["rank"]), int(values["world_size"])
        if parts.scheme == "file":
            place = f"file {parts.path}" if parts.path else ""
        elif parts.scheme == "env":
            place = _at_port(environ["MASTER_ADDR"], int(environ["MASTER_PORT"]), is_this_host)
        else:
            place = _at_port(parts.hostname, parts.port, is_this_host)
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
    return GroupRequest(place, rank, world_size, timeout_s, needs_store=parts.scheme != "file")


def _at_port(host: str | None, port: int | None, is_this_host: Callable[[str], bool]) -> str:
    is_here = host and port is not None and 0 <= port < 2**16 and is_this_host(host)
    return f"port {port}" if is_here else ""


def is_this_host(name: str) -> bool:
    """Tell whether a name or address is this machine's: only those can be bound."""
    if name in _LOCAL_NAMES:
        return True
    try:
        found = socket.getaddrinfo(name, 0, type=socket.SOCK_DGRAM)
    except OSError:
        return False
    return any(_can_bind(family, address) for family, _, _, _, address in found)


def _can_bind(family: int, address: Any) -> bool:
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.bind(address)
    except OSError:
        return False
    return True


def ask_launcher() -> None:
    """Have torch's rendezvous ask the launcher, in this process."""
    import torch.distributed

    if not torch.distributed.is_available():
        return
    # `torch.distributed.rendezvous` is the function of that name, so not by attribute.
    module = importlib.import_module("torch.distributed.rendezvous")
    handlers: dict[str, Handler] = module._rendezvous_handlers
    for scheme in ("env", "tcp", "file"):
        handlers[scheme] = _asking(handlers[scheme], module.default_pg_timeout)


def _asking(torchs_own: Handler, default_timeout: timedelta) -> Handler:
    def meet(
        url: str, timeout: timedelta = default_timeout, **options: Any
    ) -> Iterator[tuple[Any, int, int]]:
        from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

        link, timeout_s = context().launcher, timeout.total_seconds()
        wanted = None if link is None else group_request(url, timeout_s, os.environ, is_this_host)
        if link is None or wanted is None or wanted.world_size > link.world.world_size:
            yield from torchs_own(url, timeout=timeout, **options)
            return
        gathered = link.gather(wanted)
        store: Store
        if wanted.needs_store:
            store = TCPStore(ADDRESS, gathered.port, None, False, timeout, wait_for_workers=False)
        else:
            store = next(torchs_own(url, timeout=timeout))[0]
        yield PrefixStore(gathered.prefix, store), wanted.rank, wanted.world_size
        raise RuntimeError(f"ranks must meet anew for another group, not again by {url!r}.")

    return meet


def be_store(listening_fd: int, port: int, server_pid: int) -> NoReturn:
    """Turn a fresh fork of the server into the store, and never come back.

    So the store outlives every worker, and the launcher needs no torch.

    Args:
        listening_fd: a socket that listens; the store's from now on.
        port: at which it does.
        server_pid: the process that forked this one, with which it dies.
    """
    if not die_with(server_pid):
        raise SystemExit
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    from torch._C._distributed_c10d import TCPStore

    _held = TCPStore(
        ADDRESS, port, None, True, wait_for_workers=False, master_listen_fd=listening_fd
    )
    while True:
        signal.pause()
