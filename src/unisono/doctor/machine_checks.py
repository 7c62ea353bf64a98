"""Are cores, memory, limits, clock and network as training needs them? Pure verdicts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from unisono.doctor.container_limits import ContainerLimits
from unisono.doctor.diagnoses import FINE, WARNING, WRONG, Diagnosis, size
from unisono.notices import listed

_MIB, _GIB = 2**20, 2**30
_FEW_PROCESSES = 64
_SMALLEST_SHARED = 256 * _MIB
_SLOW_CLOCKS = ("hpet", "acpi_pm", "jiffies")
_YEAR_2024 = 1_704_067_200.0


def judge_cores(
    num_all: int, usable: Sequence[int], limits: ContainerLimits, governor: str
) -> Iterator[Diagnosis]:
    """Judge how many cores there are for workers.

    Args:
        num_all: of the machine.
        usable: those that this process may run on.
        limits: of its container.
        governor: how the first core's clock is chosen; empty: not known.
    """
    quota, num_usable = limits.num_cores, len(usable)
    facts = {"all": num_all, "usable": num_usable, "quota": quota}
    said = f"{num_all} core{'s' * (num_all != 1)}"
    if num_usable < num_all:
        said += f", of which this process may use {num_usable} ({ranges(usable)})"
    if quota is None or quota >= num_usable:
        verdict = WARNING if num_usable == 1 else FINE
        remedy = "With one core workers take turns; more of them do not help." * (num_usable == 1)
        yield Diagnosis("cores", verdict, f"{said}.", remedy, facts)
    else:
        times = limits.num_throttled
        stopped = f", and has been stopped {times:,} times for it" if times else ""
        yield Diagnosis(
            "cores",
            WARNING,
            f"{said}, but its container gets the time of {quota:g}{stopped}.",
            f"Start at most {max(1, int(quota))} workers with `unisono run -n`, or raise the "
            "limit (`docker run --cpus`): workers over it are stopped in the midst of steps.",
            facts,
        )
    if governor == "powersave":
        yield Diagnosis(
            "frequency",
            WARNING,
            "The cores' clock is chosen to save power (`powersave`).",
            "`cpupower frequency-set -g performance`, as root, if speed matters.",
        )


def ranges(numbers: Sequence[int]) -> str:
    """Write 0, 1, 2, 5 as ``0–2, 5``."""
    parts: list[list[int]] = []
    for number in sorted(numbers):
        if parts and number == parts[-1][1] + 1:
            parts[-1][1] = number
        else:
            parts.append([number, number])
    return ", ".join(str(a) if a == b else f"{a}–{b}" for a, b in parts)


def judge_load(load: float, num_usable: int) -> Iterator[Diagnosis]:
    """Judge whether others compute here; `load` is the mean of the last minute."""
    facts = {"load": round(load, 2)}
    if load > 0.5 * num_usable + 0.5:
        yield Diagnosis(
            "load",
            WARNING,
            f"{load:.1f} processes have been computing on {num_usable} cores in the last minute.",
            "Whatever they are, they slow workers down, and measurements: look with `top`.",
            facts,
        )
    else:
        yield Diagnosis("load", FINE, f"Load of the last minute: {load:.1f}.", facts=facts)


def judge_memory(total: int, available: int, limits: ContainerLimits) -> Iterator[Diagnosis]:
    """Judge how much memory there is, in bytes; 0: not known."""
    if not total:
        raise LookupError("MemTotal is not told")
    limit = limits.memory_bytes
    facts = {"total": total, "available": available, "limit": limit}
    room, said = available, f"{size(total)}, {size(available)} of it available"
    if limit is not None and limit < total:
        used = limits.memory_used_bytes or 0
        room = min(available, limit - used)
        said += f"; this container may use {size(limit)} and uses {size(used)}"
    if room < _GIB // 2:
        yield Diagnosis(
            "memory",
            WRONG,
            f"{said}: too little for a worker with torch.",
            "End what takes it, or give the container more (`docker run --memory`).",
            facts,
        )
    else:
        yield Diagnosis("memory", FINE, f"{said}.", facts=facts)


def judge_shared_memory(total: int | None, free: int, path: str) -> Diagnosis:
    """Judge where processes share files in memory, in bytes; None: there is no such place."""
    ours = "Unisono's workers and loader processes do not need it."
    docker = "Give the container more (`docker run --shm-size=2g`), or use `num_workers=0`."
    if total is None:
        return Diagnosis(
            "shared-memory",
            WARNING,
            f"There is no {path}, which DataLoader(num_workers=…) needs. {ours}",
            f"Mount a tmpfs there: `mount -t tmpfs tmpfs {path}`.",
        )
    facts = {"total": total, "free": free}
    said = f"{path} has {size(total)}, {size(free)} of it free"
    if total and free < total // 20:
        remedy = f"Remove what ended programs have left there: `ls -l {path}`."
        return Diagnosis("shared-memory", WRONG, f"{said}: it is full. {ours}", remedy, facts)
    if total < _SMALLEST_SHARED:
        said += ": DataLoader(num_workers=…) of torch may end with a bus error"
        return Diagnosis("shared-memory", WARNING, f"{said}. {ours}", docker, facts)
    return Diagnosis("shared-memory", FINE, f"{said}.", facts=facts)


def judge_processes(limits: ContainerLimits, user_limit: int | None) -> Diagnosis:
    """Judge how many processes and threads may be started; None: no limit."""
    most, now = limits.num_processes, limits.num_processes_now or 0
    facts = {"limit": most, "now": now, "user_limit": user_limit}
    rooms = [most - now] if most is not None else []
    rooms += [user_limit] if user_limit is not None else []
    if not rooms:
        return Diagnosis("processes", FINE, "No limit of processes.", facts=facts)
    said = f"Room for {min(rooms):,} more processes and threads"
    if min(rooms) < _FEW_PROCESSES:
        return Diagnosis(
            "processes",
            WRONG,
            f"{said}; a worker takes a dozen.",
            "Raise the limit: `docker run --pids-limit`, `ulimit -u`.",
            facts,
        )
    return Diagnosis("processes", FINE, f"{said}.", facts=facts)


def judge_open_files(soft: int | None, hard: int | None) -> Diagnosis:
    """Judge how many files a process may have open; None: no limit."""
    facts = {"soft": soft, "hard": hard}
    if soft is not None and soft < 1024:
        return Diagnosis(
            "open-files",
            WRONG if soft < 128 else WARNING,
            f"A process may have {soft} files open; loaders and launchers of many workers need "
            "more.",
            f"`ulimit -n {min(hard or 65536, 65536)}` before the program starts.",
            facts,
        )
    said = "No limit of open files." if soft is None else f"A process may have {soft:,} files open."
    return Diagnosis("open-files", FINE, said, facts=facts)


def judge_locked_memory(limit: int | None, adapters: Sequence[str]) -> Diagnosis:
    """Judge how much memory a process may lock, which InfiniBand needs; None: no limit."""
    facts = {"limit": limit, "infiniband": list(adapters)}
    if limit is not None and adapters:
        return Diagnosis(
            "locked-memory",
            WARNING,
            f"A process may lock {size(limit)} of memory, and NCCL over InfiniBand "
            f"({', '.join(adapters)}) needs more.",
            "`ulimit -l unlimited`, or `docker run --ulimit memlock=-1`.",
            facts,
        )
    how = "No limit of locked memory" if limit is None else f"A process may lock {size(limit)}"
    return (
        Diagnosis("locked-memory", FINE, f"{how}; nothing here needs it.", facts=facts)
        if not adapters
        else Diagnosis("locked-memory", FINE, f"{how}.", facts=facts)
    )


def judge_clock(
    source: str, wall_s: float, drift_s: float | None, is_synchronized: bool | None
) -> Iterator[Diagnosis]:
    """Judge the clocks.

    Args:
        source: the kernel's; empty: not known.
        wall_s: what time it is, in seconds since 1970.
        drift_s: by how much the clock of the day and the steady one have moved apart in a moment.
        is_synchronized: whether the kernel is told the time by NTP; None: not known.
    """
    facts = {"source": source, "synchronized": is_synchronized}
    if wall_s < _YEAR_2024:
        yield Diagnosis(
            "clock", WRONG, "The clock of the day is before 2024.", "Set it: `timedatectl`.", facts
        )
    elif drift_s is not None and abs(drift_s) > 0.05:
        yield Diagnosis(
            "clock",
            WARNING,
            f"The clock of the day has jumped by {drift_s:+.2f} s while this looked at it.",
            "Something sets it; times in logs are wrong by as much. Steps are timed by another.",
            facts,
        )
    elif source in _SLOW_CLOCKS:
        yield Diagnosis(
            "clock",
            WARNING,
            f"The kernel reads the time from `{source}`, which takes microseconds each time.",
            "Let it use `tsc`, or a virtual machine's own clock.",
            facts,
        )
    else:
        told = {True: ", synchronized", False: ", not synchronized by NTP", None: ""}
        known = f"The kernel's clock is `{source}`" if source else "The clocks run"
        yield Diagnosis("clock", FINE, f"{known}{told[is_synchronized]}.", facts=facts)


def judge_network(
    interfaces: Sequence[str], has_loopback: bool, knows_itself: bool | None
) -> Iterator[Diagnosis]:
    """Judge the network, which ranks of process groups meet over.

    Args:
        interfaces: their names.
        has_loopback: whether a socket can be bound to 127.0.0.1.
        knows_itself: whether the host's own name has an address; None: no answer in time.
    """
    facts = {"interfaces": list(interfaces), "name_resolves": knows_itself}
    names = listed("Interface", interfaces) if interfaces else "No network interface"
    if not has_loopback:
        yield Diagnosis(
            "network",
            WRONG,
            f"{names}; nothing can be bound to 127.0.0.1, which torch's process groups need. "
            "Unisono's own runs need no network.",
            "`ip link set lo up`, as root.",
            facts,
        )
    elif not knows_itself:
        why = "has no address" if knows_itself is False else "was not resolved within 2 s"
        yield Diagnosis(
            "network",
            WARNING,
            f"{names}; this host's own name {why}, so gloo under torchrun may fail or wait.",
            "Add the name to /etc/hosts, or set GLOO_SOCKET_IFNAME=lo. `unisono run` does.",
            facts,
        )
    else:
        yield Diagnosis("network", FINE, f"{names}; 127.0.0.1 works.", facts=facts)


def judge_looking(trouble: str, scope: str) -> Diagnosis:
    """Judge whether `unisono where` can read stacks.

    Args:
        trouble: why a child of this process could not be read; empty: it could.
        scope: what ``/proc/sys/kernel/yama/ptrace_scope`` says; empty: nothing.
    """
    facts = {"ptrace_scope": scope}
    if trouble:
        return Diagnosis(
            "stacks",
            WARNING,
            f"Stacks of other processes cannot be read ({trouble}), so `unisono where` and "
            "explanations of hangs have no lines.",
            "`docker run --cap-add SYS_PTRACE`, or `sysctl kernel.yama.ptrace_scope=1`.",
            facts,
        )
    only = "; of jobs of other launchers only root can" if scope in ("1", "2") else ""
    said = f"Stacks of workers can be read, for `unisono where`{only}."
    return Diagnosis("stacks", FINE, said, facts=facts)


def judge_temporary(path: str, free: int, is_writable: bool) -> Diagnosis:
    """Judge the folder for temporary files; `free` in bytes."""
    facts = {"path": path, "free": free}
    if not is_writable or free < 16 * _MIB:
        why = "takes no files" if not is_writable else f"has {size(free)} free"
        remedy = "Make room there, or set TMPDIR."
        return Diagnosis("temporary-files", WRONG, f"{path} {why}.", remedy, facts)
    return Diagnosis("temporary-files", FINE, f"{path} has {size(free)} free.", facts=facts)


def judge_memfd(trouble: str) -> Diagnosis:
    """Judge whether workers can share memory; `trouble` says why not."""
    if trouble:
        return Diagnosis(
            "memory-of-workers",
            WRONG,
            f"Workers share memory by memfd_create, which fails here ({trouble}).",
            "Allow it: a kernel of 3.17 or newer, and a seccomp profile that has it.",
        )
    return Diagnosis("memory-of-workers", FINE, "Workers can share memory (memfd).")
