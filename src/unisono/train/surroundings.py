"""Where does a run take place? What whoever reads its event file later may want to know."""

from __future__ import annotations

import os
import platform
import shlex
import sys
from pathlib import Path
from typing import Any

import torch

from unisono.device import Device
from unisono.procfs import read_text
from unisono.version import __version__
from unisono.workers.launcher_link import COMMAND_VARIABLE, has_launcher
from unisono.world import world


def surroundings(device: Device) -> dict[str, Any]:
    """Say where this process runs, as JSON: command, folder, host, versions, machine.

    Args:
        device: where it computes; told of where it has a memory of its own.
    """
    uname = platform.uname()
    return {
        "command": _command(),
        "folder": _folder(),
        "host": uname.node,
        "versions": {
            "unisono": __version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
        },
        "machine": {
            "processor": _processor(),
            "cores": os.cpu_count(),
            "system": f"{uname.system} {uname.release}",
            **({} if device.is_host else _of(device)),
        },
    }


def _of(device: Device) -> dict[str, Any]:
    return {"device": device.model, "device_bytes": device.room()[1]}


def _folder() -> str | None:
    """Name the working directory; None where it has been removed."""
    try:
        return os.getcwd()
    except OSError:
        return None


def _command() -> list[str]:
    """Say what the user has called, as far as this process knows."""
    if has_launcher() and COMMAND_VARIABLE in os.environ:
        return shlex.split(os.environ[COMMAND_VARIABLE])
    here = world()
    if here.started_by == "torchrun":
        return ["torchrun", f"--nproc-per-node={here.world_size}", *sys.argv]
    return ["python", *sys.orig_argv[1:]]  # with `-m package.train`, as `sys.argv` has a path


def _processor() -> str:
    """Name the processor as the kernel does; else its kind."""
    lines = read_text(Path("/proc/cpuinfo")).splitlines()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())
