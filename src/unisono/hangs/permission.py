"""May the launcher read this process's memory? Some kernels allow it only to whom one names.

Where Yama restricts that (``/proc/sys/kernel/yama/ptrace_scope`` is 1, as on Ubuntu), only the
ancestors of a process may, and whoever it names with prctl(2): here the launcher, and with it what
the launcher starts, such as the stack sampler. Nobody else gains anything.
"""

from __future__ import annotations

import ctypes
import os

from unisono.procfs import read_stat

_PR_SET_PTRACER = 0x59616D61


def let_launcher_look(server_pid: int) -> None:
    """Name the launcher as the one who may look into this process, and into forks of it.

    Args:
        server_pid: the process that the launcher has started, and that forked this one.
    """
    server = read_stat(server_pid)
    if server is None or server.parent <= 1:
        return
    launcher_pid = server.parent

    def allow() -> None:
        ctypes.CDLL(None).prctl(_PR_SET_PTRACER, launcher_pid, 0, 0, 0)

    allow()
    os.register_at_fork(after_in_child=allow)
