"""The store of torch.distributed, in which ranks exchange their addresses, as a process of its own.

The server forks it when the first group of a job is made: so it outlives every worker, and the
launcher needs no torch. It listens on loopback only, at a socket that the launcher has made.
"""

from __future__ import annotations

import signal
from typing import NoReturn

from unisono.launch.loopback import ADDRESS
from unisono.workers.lifeline import die_with


def be_store(listening_fd: int, port: int, server_pid: int) -> NoReturn:
    """Turn a fresh fork of the server into the store and never come back.

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
