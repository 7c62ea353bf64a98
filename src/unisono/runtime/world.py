"""Which rank of how many is this process? A frozen value, built by hand or from the environment.

The names are torch's: ``rank`` counts all workers, ``local_rank`` those of this host. Each launcher
sets different variables; the first row that is set counts:

=========================  ======================================================================
started by                 variables
=========================  ======================================================================
`unisono run`, torchrun,   RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE
another program, by hand
Open MPI                   OMPI_COMM_WORLD_RANK, …_SIZE, …_LOCAL_RANK, …_LOCAL_SIZE
Slurm                      SLURM_PROCID, SLURM_STEP_NUM_TASKS, SLURM_LOCALID,
                           SLURM_STEP_TASKS_PER_NODE with SLURM_NODEID
nobody                     none of these
=========================  ======================================================================

*Slurm counts only inside of a job step.* ``srun`` starts one and sets SLURM_STEP_ID. A script that
``sbatch`` runs, or one started in the shell of ``salloc``, has SLURM_PROCID 0, but is alone.

*Incomplete or contradictory variables raise an error*: a wrong guess would train alone while others
wait. One of RANK and WORLD_SIZE is enough if Slurm or Open MPI agrees with it; scripts that set
WORLD_SIZE for all tasks are common.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Hashable, Mapping, MutableMapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from unisono.runtime.habits import attributes_met

DEFAULT_DEVICES_AT_MOST = 8
WORKERS_PER_GPU_VARIABLE = "UNISONO_WORKERS_PER_GPU"
# How many workers each of several hosts has, if each has a launcher of ours.
HOSTS_VARIABLE = "UNISONO_HOSTS"
AGENT_VARIABLE = "UNISONO_AGENT"  # the process ID of the agent that runs that launcher
THREADS_VARIABLE = "UNISONO_THREADS"
THREADS_AT_MOST = 1 << 16  # more than a machine has cores; torch takes no more than a C int
WORKSPACE_VARIABLE = "CUBLAS_WORKSPACE_CONFIG"
_FIXED_WORKSPACES = ":4096:8"  # eight of 4 MiB: 32 MiB of GPU memory per process

NOBODY = "nobody"
UNISONO = "unisono"
TORCHRUN = "torchrun"
OPEN_MPI = "Open MPI"
SLURM = "Slurm"
SOMEBODY = "somebody"

# Steps that are not from `srun`: batch script, interactive shell, and external processes.
_FIRST_SPECIAL_STEP = 0xFFFFFFF0


@attributes_met("`unisono.world()`")
@dataclass(frozen=True, slots=True)
class World:
    """The position of one worker among all workers.

    Attributes:
        rank: 0 … world_size − 1.
        world_size: the number of workers.
        local_rank: 0 … local_world_size − 1 on this host.
        local_world_size: the number of workers on this host.
        started_by: ``"unisono"``, ``"torchrun"``, ``"Open MPI"``, ``"Slurm"``, ``"somebody"`` who
            set RANK and WORLD_SIZE, or ``"nobody"``; for messages, and ignored in comparisons.
    """

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    started_by: str = field(default=NOBODY, compare=False)

    def __post_init__(self) -> None:
        for name, position, count in (
            ("rank", self.rank, self.world_size),
            ("local_rank", self.local_rank, self.local_world_size),
        ):
            if not 0 <= position < count:
                raise ValueError(
                    f"`{name}` must be at least 0 and below the number of workers, "
                    f"but is {position} of {count}: check the launcher's environment variables."
                )
        if self.local_world_size > self.world_size:
            raise ValueError(
                f"`local_world_size` must be at most the number of all workers "
                f"({self.world_size}), but is {self.local_world_size}: check the launcher's "
                f"environment variables."
            )


_OF_LIBRARIES = (
    os.path.join(os.path.dirname(os.__file__), ""),
    os.path.join(os.path.dirname(os.path.dirname(__file__)), ""),
    "<",  # code that a library has made
)


class _NumWorkers:
    """`World.world_size`, which records where the program's own code reads it first."""

    def __init__(self, slot: Any) -> None:
        self._slot = slot

    def __get__(self, of: Any, kind: Any = None) -> Any:
        frame = sys._getframe(1)
        file = frame.f_code.co_filename
        if not (file.startswith(_OF_LIBRARIES) or "site-packages" in file):
            read_in_program.setdefault("at", f"{file}:{frame.f_lineno}")
        return self._slot.__get__(of, kind)

    def __set__(self, of: Any, value: int) -> None:
        self._slot.__set__(of, value)


read_in_program: dict[str, str] = {}
"""Where the program has read the number of workers, if it has."""
setattr(World, "world_size", _NumWorkers(vars(World)["world_size"]))  # noqa: B010


def world(environ: Mapping[str, str] | None = None) -> World:
    """Return this worker's position from the environment; a single process is rank 0 of 1.

    Works under `unisono run`, ``torchrun``, Slurm's ``srun`` and Open MPI's ``mpirun``; the table
    at the top of ``unisono/runtime/world.py`` lists the variables. Has no side effects.

    Args:
        environ: the variables to read; by default those of the process.

    Raises:
        ValueError: a variable is missing, is not a number, or does not fit the others.
    """
    environ = os.environ if environ is None else environ
    has_rank, has_size = "RANK" in environ, "WORLD_SIZE" in environ
    if has_rank and has_size:
        return _stated(environ)
    outer = cluster_task(environ)
    if has_rank or has_size:
        name = "RANK" if has_rank else "WORLD_SIZE"
        return _agreeing(name, _number(environ, name), outer)
    if outer is None and "PMIX_RANK" in environ:
        raise ValueError(
            f"`RANK` and `WORLD_SIZE` must say who this process is where `PMIX_RANK` "
            f"({environ['PMIX_RANK']}) is set and nothing says among how many: start it with "
            f"`mpirun`, or unset PMIX_RANK."
        )
    if outer is None and _number(environ, "PMI_SIZE", 1) > 1:
        raise ValueError(
            f"`RANK` and `WORLD_SIZE` must say who this process is where `PMI_SIZE` is "
            f"{environ['PMI_SIZE']}, as MPICH's and Intel MPI's `mpiexec` are not known: set them "
            f"to PMI_RANK ({environ.get('PMI_RANK')}) and PMI_SIZE in each process, or start it "
            f"with `unisono run`."
        )
    return outer or World()


def _stated(environ: Mapping[str, str]) -> World:
    """Return the position in RANK and WORLD_SIZE; the rendezvous rejects duplicate ranks."""
    if "UNISONO_LINK" in environ:
        started_by = UNISONO
    else:
        started_by = TORCHRUN if "TORCHELASTIC_RUN_ID" in environ else SOMEBODY
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    return _placed(environ, names, _optional(environ, "LOCAL_WORLD_SIZE"), started_by)


def _agreeing(name: str, value: int, outer: World | None) -> World:
    """Return the launcher's position if RANK or WORLD_SIZE agrees with it; otherwise raise."""
    other = "WORLD_SIZE" if name == "RANK" else "RANK"
    if outer is None:
        raise ValueError(
            f"`RANK` and `WORLD_SIZE` must be set together, but only {name} is ({value}): "
            f"set {other} too, or unset {name}."
        )
    theirs = outer.rank if name == "RANK" else outer.world_size
    if value != theirs:
        raise ValueError(
            f"`{name}` must agree with {outer.started_by}, but is {value} instead of {theirs}: "
            f"unset {name}, or set {other} too."
        )
    return outer


def cluster_task(environ: Mapping[str, str]) -> World | None:
    """Return this process's position under ``mpirun`` or ``srun``; None without them."""
    return _open_mpi(environ) or _slurm(environ)


def _open_mpi(environ: Mapping[str, str]) -> World | None:
    rank, size, local_rank, local_size = (
        f"OMPI_COMM_WORLD_{name}" for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")
    )
    if rank not in environ and size not in environ:
        return None
    names = (rank, size, local_rank, local_size)
    return _placed(environ, names, _optional(environ, local_size), OPEN_MPI)


def _slurm(environ: Mapping[str, str]) -> World | None:
    if not _is_slurm_task(environ):
        return None
    size = "SLURM_STEP_NUM_TASKS"
    names = ("SLURM_PROCID", size, "SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE")
    return _placed(environ, names, _tasks_here(environ), SLURM)


def _is_slurm_task(environ: Mapping[str, str]) -> bool:
    """Return whether this is a task of ``srun``, not a batch script or an allocation's shell."""
    if "SLURM_PROCID" not in environ:
        return False
    step = environ.get("SLURM_STEP_ID")
    if step is not None:
        return step.isdecimal() and int(step) < _FIRST_SPECIAL_STEP
    if _number(environ, "SLURM_PROCID"):
        raise ValueError(
            f"`SLURM_STEP_ID` must be set in a task of a job, but is not where SLURM_PROCID is "
            f"{environ['SLURM_PROCID']}: start the program with `srun`, and hand on its variables."
        )
    return False


def _tasks_here(environ: Mapping[str, str]) -> int | None:
    """Return the number of tasks on this host; None if unknown. ``"2(x3),1"`` is 2, 2, 2, 1."""
    form = environ.get("SLURM_STEP_TASKS_PER_NODE")
    if form is None:
        return None
    counts: list[int] = []
    for part in form.split(","):
        match = re.fullmatch(r"\s*([0-9]{1,9})(?:\(x([0-9]{1,6})\))?\s*", part)
        if match is None:
            raise ValueError(
                f"`SLURM_STEP_TASKS_PER_NODE` must be like `2(x3),1`, but is {form!r}: start the "
                f"program with `srun`."
            )
        counts += [int(match[1])] * int(match[2] or 1)
    node = _number(environ, "SLURM_NODEID", 0 if len(set(counts)) == 1 else None)
    if not 0 <= node < len(counts):
        raise ValueError(
            f"`SLURM_NODEID` must be the number of one of the {len(counts)} hosts of "
            f"SLURM_STEP_TASKS_PER_NODE ({form}), but is {node}: start the program with `srun`."
        )
    return counts[node]


def _placed(
    environ: Mapping[str, str],
    names: tuple[str, str, str, str],
    local_world_size: int | None,
    started_by: str,
) -> World:
    """Complete a position on a single host; raise if several hosts need more variables."""
    rank, world_size = _number(environ, names[0]), _number(environ, names[1])
    local_rank = _optional(environ, names[2])
    on_one_host = local_world_size in (None, world_size) and local_rank in (None, rank)
    for name, value in zip(names[2:], (local_rank, local_world_size), strict=True):
        if value is None and not on_one_host:
            raise ValueError(
                f"`{name}` must be set if there are several hosts, but is not in the process with "
                f"{names[0]}={rank} of {world_size}: set it in each process."
            )
    return World(
        rank,
        world_size,
        rank if local_rank is None else local_rank,
        world_size if local_world_size is None else local_world_size,
        started_by,
    )


def num_devices() -> int:
    """Return the default number of workers without GPUs: one per usable core, at most 8."""
    return min(len(os.sched_getaffinity(0)), DEFAULT_DEVICES_AT_MOST)


def threads_per_worker() -> int:
    """Return the number of threads per worker: ``UNISONO_THREADS``, else 1.

    It affects the bits of a result, so it is never derived from the number of workers.
    """
    threads = _number_of_at_least_1(os.environ, THREADS_VARIABLE)
    if threads > THREADS_AT_MOST:
        raise ValueError(
            f"`{THREADS_VARIABLE}` must be at most {THREADS_AT_MOST}, but is {threads}: "
            f"set it to 1."
        )
    return threads


def workers_per_gpu(environ: Mapping[str, str] | None = None) -> int:
    """Return how many workers share each GPU: ``UNISONO_WORKERS_PER_GPU``, else 1.

    Our launcher sets the variable. Worker `local_rank` uses GPU ``local_rank // workers_per_gpu``.
    """
    environ = os.environ if environ is None else environ
    return _number_of_at_least_1(environ, WORKERS_PER_GPU_VARIABLE)


def fix_workspaces(environ: MutableMapping[str, str]) -> None:
    """Set a fixed size of cuBLAS workspaces, unless the user has set one.

    Otherwise cuBLAS may return different bits each time. It reads the variable at the first matrix
    product of a process. Source: cuBLAS documentation, "Results reproducibility".
    """
    environ.setdefault(WORKSPACE_VARIABLE, _FIXED_WORKSPACES)


def _number_of_at_least_1(environ: Mapping[str, str], name: str) -> int:
    number = _number(environ, name, 1)
    if number < 1:
        raise ValueError(f"`{name}` must be at least 1, but is {number}: set it to 1.")
    return number


def _optional(environ: Mapping[str, str], name: str) -> int | None:
    return _number(environ, name) if name in environ else None


def _number(environ: Mapping[str, str], name: str, default: int | None = None) -> int:
    text = environ.get(name)
    if text is None and default is not None:
        return default
    if text is None:
        raise ValueError(f"`{name}` must be set, as others of its kind are, but is not: set it.")
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"`{name}` must be a whole number, but is {text!r}: unset it.") from None


T = TypeVar("T")

_kept: dict[tuple[Hashable, ...], Any] = {}


def per_process(make: Callable[..., T], *arguments: Hashable) -> T:
    """Return this process's only `make(*arguments)`; concurrent threads get the same object.

    A fork starts without any: it must not use objects of its parent.
    """
    key = os.getpid(), make, *arguments
    kept: T | None = _kept.get(key)
    return _kept.setdefault(key, make(*arguments)) if kept is None else kept
