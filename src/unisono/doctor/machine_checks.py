"""Are cores, memory, limits, clock and network as training needs them? Pure verdicts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from unisono.doctor.container_limits import ContainerLimits
from unisono.doctor.diagnoses import FINE, WARNING, WRONG, Diagnosis
from unisono.notices import listed
from unisono.quantities import size

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
    verdict, remedy = FINE, ""
    said = f"{num_all} core{'s' * (num_all != 1)}"
    if num_usable < num_all:
        said += f", of which this process may use {num_usable} ({ranges(usable)})"
    if quota is not None and quota < num_usable:
        verdict, times = WARNING, limits.num_throttled
        stopped = f", and has been stopped {times:,} times for it" if times else ""
        said += f", but its container gets the time of {quota:g}{stopped}"
        remedy = (
            f"Start at most {max(1, int(quota))} workers with `unisono run -n`, or raise the "
            "limit (`docker run --cpus`): workers over it are stopped in the midst of steps."
        )
    elif num_usable == 1:
        verdict, remedy = WARNING, "With one core workers take turns; more of them do not help."
    facts = {"all": num_all, "usable": num_usable, "quota": quota}
    yield Diagnosis("cores", verdict, f"{said}.", remedy, facts)
    if governor == "powersave":
        said = "The cores' clock is chosen to save power (`powersave`)."
        remedy = "`cpupower frequency-set -g performance`, as root, if speed matters."
        yield Diagnosis("frequency", WARNING, said, remedy)


def ranges(numbers: Sequence[int]) -> str:
    """Write 0, 1, 2, 5 as ``0–2, 5``."""
    parts: list[list[int]] = []
    for number in sorted(numbers):
        if parts and number == parts[-1][1] + 1:
            parts[-1][1] = number
        else:
            parts.append([number, number])
    return ", ".join(str(a) if a == b else f"{a}–{b}" for a, b in parts)


def judge_load(load: float, num_usable: int) -> Diagnosis:
    """Judge whether others compute here; `load` is the mean of the last minute."""
    verdict, said, remedy = FINE, f"Load of the last minute: {load:.1f}.", ""
    if load > 0.5 * num_usable + 0.5:
        verdict = WARNING
        said = f"{load:.1f} processes have been computing on {num_usable} cores in the last minute."
        remedy = "Whatever they are, they slow workers down, and measurements: look with `top`."
    return Diagnosis("load", verdict, said, remedy, {"load": round(load, 2)})


def judge_memory(total: int, available: int, limits: ContainerLimits) -> Diagnosis:
    """Judge how much memory there is, in bytes; 0: not known."""
    if not total:
        raise LookupError("MemTotal is not told")
    limit = limits.memory_bytes
    verdict, remedy = FINE, ""
    room, said = available, f"{size(total)}, {size(available)} of it available"
    if limit is not None and limit < total:
        used = limits.memory_used_bytes or 0
        room = min(available, limit - used)
        said += f"; this container may use {size(limit)} and uses {size(used)}"
    if room < _GIB // 2:
        verdict, said = WRONG, f"{said}: too little for a worker with torch"
        remedy = "End what takes it, or give the container more (`docker run --memory`)."
    facts = {"total": total, "available": available, "limit": limit}
    return Diagnosis("memory", verdict, f"{said}.", remedy, facts)


def judge_shared_memory(total: int | None, free: int, path: str) -> Diagnosis:
    """Judge where processes share files in memory, in bytes; None: there is no such place."""
    ours = "Unisono's workers and loader processes do not need it."
    if total is None:
        said = f"There is no {path}, which DataLoader(num_workers=…) needs. {ours}"
        remedy = f"Mount a tmpfs there: `mount -t tmpfs tmpfs {path}`."
        return Diagnosis("shared-memory", WARNING, said, remedy)
    verdict, remedy = FINE, ""
    said = f"{path} has {size(total)}, {size(free)} of it free"
    if total and free < total // 20:
        verdict, said = WRONG, f"{said}: it is full. {ours}"
        remedy = f"Remove what ended programs have left there: `ls -l {path}`."
    elif total < _SMALLEST_SHARED:
        verdict = WARNING
        said += f": DataLoader(num_workers=…) of torch may end with a bus error. {ours}"
        remedy = "Give the container more (`docker run --shm-size=2g`), or use `num_workers=0`."
    else:
        said += "."
    return Diagnosis("shared-memory", verdict, said, remedy, {"total": total, "free": free})


def judge_processes(limits: ContainerLimits, user_limit: int | None) -> Diagnosis:
    """Judge how many processes and threads may be started; None: no limit."""
    most, now = limits.num_processes, limits.num_processes_now or 0
    rooms = [most - now] if most is not None else []
    rooms += [user_limit] if user_limit is not None else []
    verdict, said, remedy = FINE, "No limit of processes.", ""
    if rooms:
        said = f"Room for {min(rooms):,} more processes and threads."
    if rooms and min(rooms) < _FEW_PROCESSES:
        verdict, said = WRONG, f"{said[:-1]}; a worker takes a dozen."
        remedy = "Raise the limit: `docker run --pids-limit`, `ulimit -u`."
    facts = {"limit": most, "now": now, "user_limit": user_limit}
    return Diagnosis("processes", verdict, said, remedy, facts)


def judge_open_files(soft: int | None, hard: int | None) -> Diagnosis:
    """Judge how many files a process may have open; None: no limit."""
    verdict, said, remedy = FINE, "No limit of open files.", ""
    if soft is not None:
        said = f"A process may have {soft:,} files open."
    if soft is not None and soft < 1024:
        verdict = WRONG if soft < 128 else WARNING
        said = f"{said[:-1]}; loaders and launchers of many workers need more."
        remedy = f"`ulimit -n {min(hard or 65536, 65536)}` before the program starts."
    return Diagnosis("open-files", verdict, said, remedy, {"soft": soft, "hard": hard})


def judge_locked_memory(limit: int | None, adapters: Sequence[str]) -> Diagnosis:
    """Judge how much memory a process may lock, which InfiniBand needs; None: no limit."""
    how = "No limit of locked memory" if limit is None else f"A process may lock {size(limit)}"
    verdict, said, remedy = FINE, f"{how}.", ""
    if not adapters:
        said = f"{how}; nothing here needs it."
    elif limit is not None:
        names = ", ".join(adapters)
        verdict = WARNING
        said = f"{how} of memory, and NCCL over InfiniBand ({names}) needs more."
        remedy = "`ulimit -l unlimited`, or `docker run --ulimit memlock=-1`."
    facts = {"limit": limit, "infiniband": list(adapters)}
    return Diagnosis("locked-memory", verdict, said, remedy, facts)


def judge_clock(
    source: str, wall_s: float, drift_s: float | None, is_synchronized: bool | None
) -> Diagnosis:
    """Judge the clocks.

    Args:
        source: the kernel's; empty: not known.
        wall_s: what time it is, in seconds since 1970.
        drift_s: by how much the clock of the day and the steady one have moved apart in a moment.
        is_synchronized: whether the kernel is told the time by NTP; None: not known.
    """
    told = {True: ", synchronized", False: ", not synchronized by NTP", None: ""}
    known = f"The kernel's clock is `{source}`" if source else "The clocks run"
    verdict, said, remedy = FINE, f"{known}{told[is_synchronized]}.", ""
    if wall_s < _YEAR_2024:
        verdict, said = WRONG, "The clock of the day is before 2024."
        remedy = "Set it: `timedatectl`."
    elif drift_s is not None and abs(drift_s) > 0.05:
        verdict = WARNING
        said = f"The clock of the day has jumped by {drift_s:+.2f} s while this looked at it."
        remedy = (
            "Something sets it; times in logs are wrong by as much. Steps are timed by another."
        )
    elif source in _SLOW_CLOCKS:
        verdict = WARNING
        said = f"The kernel reads the time from `{source}`, which takes microseconds each time."
        remedy = "Let it use `tsc`, or a virtual machine's own clock."
    facts = {"source": source, "synchronized": is_synchronized}
    return Diagnosis("clock", verdict, said, remedy, facts)


def judge_network(
    interfaces: Sequence[str], has_loopback: bool, knows_itself: bool | None
) -> Diagnosis:
    """Judge the network, which ranks of process groups meet over.

    Args:
        interfaces: their names.
        has_loopback: whether a socket can be bound to 127.0.0.1.
        knows_itself: whether the host's own name has an address; None: no answer in time.
    """
    names = listed("Interface", interfaces) if interfaces else "No network interface"
    verdict, said, remedy = FINE, f"{names}; 127.0.0.1 works.", ""
    if not has_loopback:
        verdict, remedy = WRONG, "`ip link set lo up`, as root."
        said = (
            f"{names}; nothing can be bound to 127.0.0.1, which torch's process groups need. "
            "Unisono's own runs need no network."
        )
    elif not knows_itself:
        why = "has no address" if knows_itself is False else "was not resolved within 2 s"
        verdict = WARNING
        said = f"{names}; this host's own name {why}, so gloo under torchrun may fail or wait."
        remedy = "Add the name to /etc/hosts, or set GLOO_SOCKET_IFNAME=lo. `unisono run` does."
    facts = {"interfaces": list(interfaces), "name_resolves": knows_itself}
    return Diagnosis("network", verdict, said, remedy, facts)


def judge_looking(trouble: str, scope: str) -> Diagnosis:
    """Judge whether `unisono where` can read stacks.

    Args:
        trouble: why a child of this process could not be read; empty: it could.
        scope: what ``/proc/sys/kernel/yama/ptrace_scope`` says; empty: nothing.
    """
    only = "; of jobs of other launchers only root can" if scope in ("1", "2") else ""
    verdict, remedy = FINE, ""
    said = f"Stacks of workers can be read, for `unisono where`{only}."
    if trouble:
        verdict = WARNING
        said = (
            f"Stacks of other processes cannot be read ({trouble}), so `unisono where` and "
            "explanations of hangs have no lines."
        )
        remedy = "`docker run --cap-add SYS_PTRACE`, or `sysctl kernel.yama.ptrace_scope=1`."
    return Diagnosis("stacks", verdict, said, remedy, {"ptrace_scope": scope})


def judge_temporary(path: str, free: int, is_writable: bool) -> Diagnosis:
    """Judge the folder for temporary files; `free` in bytes."""
    verdict, said, remedy = FINE, f"{path} has {size(free)} free.", ""
    if not is_writable:
        said = f"{path} takes no files."
    if not is_writable or free < 16 * _MIB:
        verdict, remedy = WRONG, "Make room there, or set TMPDIR."
    return Diagnosis("temporary-files", verdict, said, remedy, {"path": path, "free": free})


def judge_memfd(trouble: str) -> Diagnosis:
    """Judge whether workers can share memory; `trouble` says why not."""
    verdict, said, remedy = FINE, "Workers can share memory (memfd).", ""
    if trouble:
        verdict = WRONG
        said = f"Workers share memory by memfd_create, which fails here ({trouble})."
        remedy = "Allow it: a kernel of 3.17 or newer, and a seccomp profile that has it."
    return Diagnosis("memory-of-workers", verdict, said, remedy)
