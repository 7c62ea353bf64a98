"""Do cores, memory, limits and environment variables suit training?"""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

from unisono.runtime.faults import FAULTS_VARIABLE
from unisono.runtime.hangs.stacks import sample
from unisono.runtime.launch.placement import VISIBLE_VARIABLE, gpus_of_driver, visible_gpus
from unisono.runtime.notices import shown, size
from unisono.runtime.procfs import group_folders, read_text
from unisono.runtime.world import world
from unisono.tools.doctor.torch_checks import torch_and_gpus
from unisono.tools.verify.findings import OK, UNKNOWN, WARNING, WRONG, Finding

_NO_LIMIT = 1 << 60  # version 1 of control groups writes a huge number for none
_LITTLE_MEMORY, _LITTLE_SHARED, _FEW_FILES = 2**29, 2**28, 1024
_LOOK_S = 0.2


def machine_probes(root: Path) -> dict[str, Callable[[], Iterable[Finding]]]:
    """Return the checks of the machine, by name."""
    num_cores, num_all = len(os.sched_getaffinity(0)), os.cpu_count() or 1
    files, shared = resource.getrlimit(resource.RLIMIT_NOFILE)[0], str(root / "dev/shm")
    return {
        "cores": lambda: [judge_cores(num_all, num_cores, container_cores(root))],
        "memory": lambda: [judge_memory(psutil.virtual_memory(), container_memory_left(root))],
        "shared-memory": lambda: [judge_shared_memory(psutil.disk_usage(shared).free)],
        "open-files": lambda: [judge_open_files(files)],
        "stacks": lambda: [judge_stacks(_trouble_with_looking())],
    }


def container_memory_left(root: Path) -> int | None:
    """Return the bytes that a container or batch job has left; None if no limit is found.

    A control group's limit also holds for the groups below it, so the smallest on the way up
    counts. Source: cgroups(7), the kernel's documentation of both versions.
    """
    left = []
    for folder in group_folders("memory", root):
        for limit, used in (
            ("memory.max", "memory.current"),
            ("memory.limit_in_bytes", "memory.usage_in_bytes"),
        ):
            most, now = (read_text(folder / name).strip() for name in (limit, used))
            if most.isdecimal() and int(most) < _NO_LIMIT:
                left.append(int(most) - (int(now) if now.isdecimal() else 0))
    return min(left, default=None)


def container_cores(root: Path) -> float | None:
    """Return the cores' time that a container gets (`docker run --cpus`); None: no limit."""
    cores = []
    for folder in group_folders("cpu", root):
        quota, *period = read_text(folder / "cpu.max").split() or [
            read_text(folder / f"cpu.cfs_{name}_us").strip() for name in ("quota", "period")
        ]
        if quota.isdecimal() and len(period) == 1 and period[0].isdecimal() and int(period[0]):
            cores.append(int(quota) / int(period[0]))
    return min(cores, default=None)


def judge_cores(num_all: int, num_usable: int, quota: float | None) -> Finding:
    """Judge the cores: how many exist, this process may use, and its container gets time of."""
    verdict, remedy = OK, ""
    said = f"{num_all} core{'s' * (num_all != 1)}"
    if num_usable < num_all:
        said += f", of which this process may use {num_usable}"
    if quota is not None and quota < num_usable:
        verdict, said = WARNING, f"{said}, but its container gets the time of {quota:g}"
        remedy = (
            f"Start at most {max(1, int(quota))} workers with `unisono run -n`, or raise the "
            "limit (`docker run --cpus`): workers over it are paused during steps."
        )
    elif num_usable == 1:
        verdict, remedy = WARNING, "With one core, workers take turns; more of them do not help."
    return Finding("cores", verdict, f"{said}.", remedy)


def judge_memory(found: Any, container_left: int | None) -> Finding:
    """Judge the memory that psutil reports, and what a container leaves of it."""
    room, said = found.available, f"{size(found.total)}, {size(found.available)} of it available"
    if container_left is not None and container_left < room:
        room, said = container_left, f"{said}, {size(container_left)} to this container"
    if room >= _LITTLE_MEMORY:
        return Finding("memory", OK, f"{said}.")
    remedy = "End what uses it, or give the container more (`docker run --memory`)."
    return Finding("memory", WRONG, f"{said}: too little for a worker with torch.", remedy)


def judge_shared_memory(free: int) -> Finding:
    """Judge the free bytes where processes share files in memory."""
    said = f"/dev/shm has {size(free)} free"
    if free >= _LITTLE_SHARED:
        return Finding("shared-memory", OK, f"{said}.")
    said += ": torch's DataLoader(num_workers=…) may end with a bus error. Unisono needs none."
    remedy = "Give the container more (`docker run --shm-size=2g`), or look with `ls -l /dev/shm`."
    return Finding("shared-memory", WARNING, said, remedy)


def judge_open_files(most: int) -> Finding:
    """Judge the limit on open files of a process; -1: no limit."""
    if not 0 <= most < _FEW_FILES:
        return Finding("open-files", OK, "The limit on open files is high enough.")
    said = f"A process may have {most:,} files open; launchers of many workers need more."
    return Finding("open-files", WRONG, said, "`ulimit -n 65536` before the program starts.")


def judge_stacks(trouble: str) -> Finding:
    """Judge whether `unisono where` can read stacks; `trouble` is why it cannot."""
    if not trouble:
        return Finding("stacks", OK, "Stacks of workers can be read, for `unisono where`.")
    said = (
        f"Stacks of other processes cannot be read ({trouble}), so `unisono where` and "
        "explanations of hangs have no lines."
    )
    remedy = "`docker run --cap-add SYS_PTRACE`, or `sysctl kernel.yama.ptrace_scope=1`."
    return Finding("stacks", WARNING, said, remedy)


def _trouble_with_looking() -> str:
    """Return why the stack of a child process cannot be read; empty if it can."""
    sleeping = "import time; time.sleep(30)"
    with subprocess.Popen([sys.executable, "-S", "-c", sleeping]) as child:
        time.sleep(_LOOK_S)
        trouble = sample([child.pid])[child.pid].trouble
        child.kill()
    return trouble


_OFF = ("", "0", "false", "off", "info")
_BITS = "changes the bits of results, and is part of no checkpoint"
_RULES = {
    FAULTS_VARIABLE: "makes workers fail on purpose",
    "CUDA_LAUNCH_BLOCKING": "makes training slow: the host waits for every kernel",
    "TORCH_DISTRIBUTED_DEBUG": "makes training slow: ranks compare all collectives",
    "NCCL_P2P_DISABLE": "makes training slow: GPUs do not copy to each other",
    "MALLOC_PERTURB_": "makes training slow: all memory is written twice",
    "OMP_PROC_BIND": "binds the threads of all workers to the same cores",
    "NVIDIA_TF32_OVERRIDE": _BITS,
    "ATEN_CPU_CAPABILITY": _BITS,
    "MKL_CBWR": _BITS,
}
_INTERFACES = ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME")


def judge_settings(
    environ: Mapping[str, str], interfaces: Sequence[str], gpus: Sequence[str]
) -> list[Finding]:
    """Judge environment variables, given the interfaces and GPUs of this machine."""
    found = [
        Finding("settings", verdict, f"{said}.", remedy)
        for verdict, said, remedy in (
            *_by_table(environ, interfaces),
            *_of_gpus(environ, gpus),
            *_of_ranks(environ),
        )
    ]
    return found or [Finding("settings", OK, "No problematic environment variables.")]


def _by_table(environ: Mapping[str, str], there: Sequence[str]) -> Iterator[tuple[str, str, str]]:
    for name, value in sorted(environ.items()):
        why = _RULES.get(name, "")
        if why == _BITS or (why and value.lower() not in _OFF):
            verdict = WRONG if name == FAULTS_VARIABLE else WARNING
            yield verdict, f"{name}={shown(value, 60)} {why}", "Unset it unless you mean it."
    for name in _INTERFACES:
        wanted = environ.get(name, "")
        asked = [one.strip().lstrip("=") for one in wanted.split(",")]
        is_there = any(known.startswith(one) for one in asked for known in there)
        if not is_there and not wanted.startswith("^"):
            said = f"{name}={shown(wanted, 60)} names no interface of this machine"
            said += f" ({', '.join(there)}), so ranks cannot connect"
            yield WRONG, said, "Unset it, or name one that is there."


def _of_gpus(environ: Mapping[str, str], gpus: Sequence[str]) -> Iterator[tuple[str, str, str]]:
    text = environ.get(VISIBLE_VARIABLE)
    if text is None or not gpus:
        return
    seen = visible_gpus(environ, gpus)
    asked = [part for part in text.split(",") if part.strip()]
    said = f"{VISIBLE_VARIABLE}={shown(text, 60)} shows {len(seen)} of {len(gpus)} GPUs"
    if len(seen) < len(asked):
        remedy = "`nvidia-smi -L` lists them; unset it to see all."
        yield WRONG, f"{said}, fewer than it names", remedy
    elif len(seen) < len(gpus):
        yield WARNING, said, "Unset it to see all."


def _of_ranks(environ: Mapping[str, str]) -> Iterator[tuple[str, str, str]]:
    try:
        here = world(environ)
    except ValueError as error:
        yield WRONG, str(error).rstrip("."), "See above."
        return
    if here.world_size > 1:
        said = (
            f"The environment says that this is rank {here.rank} of {here.world_size}, so a "
            "program that is started here waits for the others"
        )
        remedy = "Unset RANK, WORLD_SIZE and the like, unless a launcher has started this."
        yield WARNING, said, remedy


def examine(environ: Mapping[str, str]) -> list[Finding]:
    """Examine this machine."""
    gpus, interfaces = gpus_of_driver(), list(psutil.net_if_addrs())
    probes = {
        "torch": lambda: torch_and_gpus(environ, gpus),
        **machine_probes(Path("/")),
        "settings": lambda: judge_settings(environ, interfaces, [gpu.uuid for gpu in gpus]),
    }
    return list(observe(probes))


def observe(probes: Mapping[str, Callable[[], Iterable[Finding]]]) -> Iterator[Finding]:
    """Run checks one after another; a check that fails is reported as unknown."""
    for check, probe in probes.items():
        try:
            yield from list(probe())
        except Exception as error:  # an unusual machine may cause any error
            why = f"{type(error).__name__}: {error}".rstrip(": ")
            yield Finding(check, UNKNOWN, f"This could not be read ({why}).")


def summary(findings: Sequence[Finding]) -> str:
    """Return all findings in one sentence."""
    words = {WRONG: "wrong", WARNING: "to look at", UNKNOWN: "could not be read"}
    parts = []
    for verdict, what in words.items():
        if found := [one.check for one in findings if one.verdict == verdict]:
            parts.append(f"{len(found)} {what}: {', '.join(dict.fromkeys(found))}")
    return f"{'; '.join(parts)}." if parts else "Nothing is wrong with this machine."
