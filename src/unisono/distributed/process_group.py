"""Sets up a process group and tears it down again in any case.

Only :func:`num_gpus` queries GPUs. (The launcher, which must not initialize CUDA, queries the
driver: ``placement.py``.) All ranks make common decisions from the same gathered choices: they may
have chosen different seeds, different backends (and would wait until the timeout) or the same GPU.
"""

from __future__ import annotations

import atexit
import gc
import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from types import TracebackType
from typing import Any, final

import torch
import torch.distributed as dist

from unisono.errors import MismatchError, RendezvousError
from unisono.plan.seeds import seed_of
from unisono.runtime.device import seed_generators
from unisono.runtime.notices import say
from unisono.runtime.timeouts import GROUP, check_seconds
from unisono.runtime.whole import check_whole
from unisono.runtime.workers.context import context
from unisono.runtime.workers.gathering import Gathering
from unisono.runtime.workers.interfaces import interface_here
from unisono.runtime.workers.launcher_messages import IN_INIT, MakesGroup
from unisono.runtime.workers.rendezvous import RankPlaces, prefixed
from unisono.runtime.workers.shown_wait import ShownWait
from unisono.runtime.world import SOMEBODY, WORKERS_PER_GPU_VARIABLE, World, workers_per_gpu

_GLOO_INTERFACE = "GLOO_SOCKET_IFNAME"


@final
class Here:
    """The position of this process while there is a process group; see :func:`init`.

    As a context manager it closes itself at the end of the block.

    Attributes:
        world: rank, world_size, local_rank, local_world_size, and who started this process. Where
            only RANK and WORLD_SIZE are set, ranks of other hosts are found and not counted as
            local, which :func:`unisono.world` cannot know.
        device: the device that this worker computes on; for CUDA also the current device.
        backend: the backend that torch was given.
        seed: the initial seed of all ranks' generators.
    """

    def __init__(self, here: World, device: torch.device, backend: str, seed: int) -> None:
        self.world = here
        self.device = device
        self.backend = backend
        self.seed = seed
        self._pid = os.getpid()
        self._is_open = True
        self._leaves_interface = False

    @property
    def rank(self) -> int:
        """0 … world_size − 1."""
        return self.world.rank

    @property
    def world_size(self) -> int:
        """The number of workers."""
        return self.world.world_size

    @property
    def local_rank(self) -> int:
        """0 … local_world_size − 1 on this host."""
        return self.world.local_rank

    def seed_apart(self) -> None:
        """Seed this rank's generators differently from all other ranks'.

        Use it for random numbers that should differ between ranks, such as dropout and
        augmentation, once the model is created, alike on all. Depends only on seed and rank.
        """
        _seed_generators(seed_of("rank", self.seed, self.world.rank))

    def close(self) -> None:
        """Tear down the process group unless it is closed; then `init` may be called again.

        Drop what uses the group first (DDP models, Works of collectives) where you can.
        """
        self._close(has_failed=False)

    def __enter__(self) -> Here:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._close(has_failed=error is not None)

    def _open(self, ranks: Gathering, timeout_s: float, *, is_one_host: bool) -> None:
        here = self.world
        if "gloo" in self.backend and _GLOO_INTERFACE not in os.environ:
            # gloo would listen on the address of the host's name.
            with suppress(RendezvousError):  # unknown which interface leads to the other hosts
                os.environ[_GLOO_INTERFACE] = "lo" if is_one_host else interface_here()
                self._leaves_interface = True
        more: dict[str, Any] = {}
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
            more["device_id"] = self.device
        dist.init_process_group(
            self.backend,
            store=prefixed("group", ranks.store),
            rank=here.rank,
            world_size=here.world_size,
            timeout=timedelta(seconds=timeout_s),
            **more,
        )
        # The rank that hosts the store must not end before the others have read it.
        ranks.gather("group", None)
        atexit.register(self._close_at_exit)

    def _close(self, *, has_failed: bool) -> None:
        """Tear down the group; an error is raised only if nothing failed before, else reported."""
        if not self._is_open or os.getpid() != self._pid:
            return
        self._is_open = False
        # Collect garbage: a group that is still referenced would be destroyed at shutdown.
        gc.collect()
        try:
            if has_failed and self.device.type == "cuda" and dist.is_initialized():
                # An orderly end would wait for the others, which wait for this rank.
                dist.distributed_c10d._abort_process_group()
            elif dist.is_initialized():
                dist.destroy_process_group()
        except Exception as error:
            if not has_failed:
                raise
            say(f"ending the process group failed, too: {error}")
        finally:
            if self._leaves_interface:
                os.environ.pop(_GLOO_INTERFACE, None)

    def _close_at_exit(self) -> None:
        # Even if the group is closed: a model may still hold it.
        _release_groups()
        self._close(has_failed=getattr(sys, "last_value", None) is not None)


def init(
    backend: str | None = None, *, seed: int | None = 0, timeout_s: float | None = None
) -> Here:
    """Set up torch's process group, this worker's device and its random generators.

    Collective: every rank calls it. For programs that use ``torch.distributed`` themselves, which
    :class:`unisono.Trainer` does not require. A single process is a group of one.

    The group is torn down at the end of the ``with`` block, by ``close()``, or at the end of the
    program, even after an exception; then `init` may be called again.

    Args:
        backend: as ``init_process_group`` takes it; None: ``"nccl"`` where there are GPUs, else
            ``"unisono"``, or ``"gloo"`` on several hosts.
        seed: the initial seed of the generators of Python, numpy (if loaded) and torch (all
            devices): the same on every rank, since it determines models; see ``seed_apart``.
            None: rank 0 draws one. At least 0.
        timeout_s: how long a rank may wait for another, here and in collectives, in seconds; by
            default 1800, or what UNISONO_GROUP_TIMEOUT says.

    Returns:
        Where this process is: ``rank``, ``world_size``, ``local_rank``, ``device``, ``seed``.

    Raises:
        ValueError: an argument or the environment does not fit, or two workers have one GPU; the
            message says what to do.
        RuntimeError: there is a process group already.
        MismatchError: ranks pass different seeds, or have different backends.
        RendezvousError: the ranks cannot find each other.
        WaitTimeoutError: a rank did not join in time.
        PeerLostError: a rank has ended meanwhile.
    """
    _check(backend, timeout_s)
    if seed is not None:
        seed = check_whole("seed", seed, at_least=0, below=2**63)
    if dist.is_initialized():
        raise RuntimeError(
            "`unisono.distributed.init` must be called once before the program ends its process "
            "group, but there is one already: use what the first call returned, and close it "
            "before the next."
        )
    place = context().world
    timeout_s = GROUP.in_s() if timeout_s is None else timeout_s
    with closing(ShownWait()) as shown:
        if place.world_size > 1:
            context().supervisor.notify(MakesGroup())
        rendezvous = context().rendezvous(timeout_s)
        ranks = rendezvous.gathering(
            "`unisono.distributed.init`",
            timeout_s,
            speaks=not context().supervisor.explains_waits,
            watch=lambda waited_s: shown.report_if_due(waited_s, lambda: IN_INIT),
        )
        return _init(ranks, rendezvous.places, place, backend, seed, timeout_s)


def _init(
    ranks: Gathering,
    places: RankPlaces,
    place: World,
    backend: str | None,
    seed: int | None,
    timeout_s: float,
) -> Here:
    place = place_among(place, places, os.environ)
    num_hosts = len(places.ranks_of_host)
    backend, device = choose(place, backend, num_gpus(), workers_per_gpu(), num_hosts)
    mine = Choice(backend, seed, int.from_bytes(os.urandom(7), "little"), name_of(device))
    choices = ranks.gather("choice", asdict(mine))
    agreed = agreed_seed([Choice(**choice) for choice in choices])
    here = Here(place, device, backend, agreed)
    try:
        here._open(ranks, timeout_s, is_one_host=num_hosts == 1)
    except BaseException:
        here._close(has_failed=True)
        raise
    _seed_generators(agreed)
    return here


def _check(backend: object, timeout_s: Any) -> None:
    if backend is not None and not isinstance(backend, str):
        raise TypeError(
            f"`backend` must be a name such as 'gloo', or None, but is {backend!r}: leave it out."
        )
    if timeout_s is not None:
        check_seconds("timeout_s", timeout_s, GROUP)


def _seed_generators(seed: int) -> None:
    torch.manual_seed(seed)
    seed_generators(seed)


def _release_groups() -> None:
    """Release the groups of all DDP models, at the end of a program.

    A gloo group that lives until interpreter shutdown may abort the process.
    """
    module = sys.modules.get("torch.nn.parallel.distributed")
    if module is None:
        return
    for item in gc.get_objects():
        if issubclass(type(item), module.DistributedDataParallel):
            for name in ("reducer", "logger"):
                item.__dict__.pop(name, None)


_FOR_GPUS, _FOR_CPUS, _FOR_HOSTS = "nccl", "unisono", "gloo"


def num_gpus() -> int:
    """Return the number of GPUs that this process may use."""
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def choose(
    here: World, backend: str | None, gpus: int, sharing: int = 1, num_hosts: int = 1
) -> tuple[str, torch.device]:
    """Return the backend, and the device for it: a GPU for NCCL, else the CPU."""
    if backend is None:
        backend = _FOR_GPUS if gpus else _FOR_CPUS if num_hosts == 1 else _FOR_HOSTS
    if num_hosts > 1 and _FOR_CPUS in backend:
        raise ValueError(
            f"`backend` must join several hosts ({num_hosts}), but {backend!r} joins processes of "
            f"one, which share memory: leave it out, or pass `backend={_FOR_HOSTS!r}`."
        )
    if _FOR_GPUS not in backend:
        return backend, torch.device("cpu")
    seen = f"rank {here.rank} sees {gpus}"
    if sharing > 1 and here.local_world_size > 1:
        seen = f"{sharing} of them share each GPU ({WORKERS_PER_GPU_VARIABLE}={sharing})"
    elif gpus >= here.local_world_size:
        return backend, torch.device("cuda", here.local_rank)
    elif gpus == 1:
        # Slurm, say, shows each task only its GPU, as number 0. :func:`agreed_seed` checks them.
        return backend, torch.device("cuda", 0)
    raise ValueError(
        f"each of the {here.local_world_size} workers of this host must have its own GPU for the "
        f"backend {backend!r}, but {seen}: start fewer workers, without `--workers-per-gpu`, "
        f'or pass `backend="unisono"`, or "gloo" on several hosts, to compute on the CPU.'
    )


def name_of(device: torch.device) -> str:
    """Return a GPU's unique name, the same in every process; empty for the CPU."""
    if device.type != "cuda":
        return ""
    return f"GPU-{torch.cuda.get_device_properties(device).uuid}"


@dataclass(frozen=True, slots=True)
class Choice:
    """What one rank has chosen."""

    backend: str  # as torch accepts it
    seed: int | None  # as passed; None: rank 0 draws one
    drawn: int  # the seed if this is rank 0 and none was passed
    gpu: str = ""  # its GPU's unique name; empty on the CPU


def agreed_seed(choices: Sequence[Choice]) -> int:
    """Check that the ranks' choices, in rank order, are compatible; return the common seed."""
    first = choices[0]
    owners: dict[str, int] = {}
    for rank, choice in enumerate(choices):
        if choice.backend != first.backend:
            raise MismatchError(
                f"`backend` must be the same on every rank, but is {first.backend!r} on rank 0 and "
                f"{choice.backend!r} on rank {rank}: pass the same everywhere. (None is 'nccl' "
                f"where a process sees GPUs, else 'unisono', or 'gloo' on several hosts: look why "
                f"these two differ there.)"
            )
        if choice.seed != first.seed:
            raise MismatchError(
                f"`seed` must be the same on every rank, so that all make the same model, but is "
                f"{first.seed} on rank 0 and {choice.seed} on rank {rank}: pass the same "
                f"everywhere, and call `seed_apart()` of what `unisono.distributed.init` returns "
                f"where ranks are to differ."
            )
        if choice.gpu and owners.setdefault(choice.gpu, rank) != rank:
            raise ValueError(
                f"each worker must have its own GPU for the backend {choice.backend!r}, but "
                f"ranks {owners[choice.gpu]} and {rank} have the same one ({choice.gpu}): start "
                f'fewer workers, or pass `backend="unisono"`, or "gloo" on several hosts, to '
                f"compute on the CPU."
            )
    return first.drawn if first.seed is None else first.seed


def place_among(here: World, places: RankPlaces, environ: Mapping[str, str]) -> World:
    """Correct a worker's position from the ranks on its host, unless its variables have it.

    By hand, and in containers with one process each, RANK and WORLD_SIZE are often all that is set;
    :func:`unisono.world` then assumes that all ranks are on one host.
    """
    if here.started_by != SOMEBODY or "LOCAL_RANK" in environ:
        return here
    ranks = places.local_ranks
    return replace(here, local_rank=ranks.index(here.rank), local_world_size=len(ranks))
