"""`unisono run --nnodes`: several hosts, which torchrun starts and restarts, and we compute on.

A thin way for machines without Slurm or Kubernetes: the same command on each, with its own number.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import click

from unisono.cli.endings import Refusal
from unisono.errors import RendezvousError
from unisono.workers.interfaces import INTERFACE_VARIABLE, address_here
from unisono.world import HOSTS_VARIABLE, num_devices

# They belong to our launcher, which starts no workers there.
_OF_ONE_HOST = {
    *("replaces", "gpus", "workers_per_gpu", "stages", "backend", "debug"),
}


@dataclass(frozen=True, slots=True)
class SeveralHosts:
    """Which of several hosts this is. Final.

    Attributes:
        nnodes: how many there are.
        node_rank: the number of this one.
        rendezvous: where host 0 is reached, as ``host:port``.
        interface: which of this host's leads to the others; None: the one towards host 0.
    """

    nnodes: int
    node_rank: int
    rendezvous: str
    interface: str | None

    @property
    def place(self) -> tuple[str, str]:
        """The rendezvous' host and port."""
        host, _, port = self.rendezvous.rpartition(":")
        return host.strip("[]"), port

    def environ(self, environ: Mapping[str, str], threads: int) -> dict[str, str]:
        """Say which variables the workers have."""
        own = {"UNISONO_THREADS": str(threads), "CUDA_VISIBLE_DEVICES": ""}
        if self.interface is not None:
            own[INTERFACE_VARIABLE] = self.interface
        # torchrun would choose one, and say so in five lines.
        return {"OMP_NUM_THREADS": str(threads), **environ, **own}

    def command(
        self, script: Sequence[str], *, workers: int, flags: Mapping[str, object], address: str
    ) -> list[str]:
        """Say what to run on this host.

        Args:
            script: with its arguments.
            workers: how many on this host.
            flags: of the launchers; `--restarts` is also how often torchrun starts all again.
            address: where the others reach this host.
        """
        return [
            *(sys.executable, "-m", "torch.distributed.run"),
            *("--nnodes", str(self.nnodes), "--nproc-per-node", "1"),
            *("--rdzv-backend", "c10d", "--rdzv-endpoint", self.rendezvous),
            *("--rdzv-id", "unisono", "--rdzv-conf", f"is_host={int(self.node_rank == 0)}"),
            *("--max-restarts", str(flags["--restarts"]), "--local-addr", address),
            *("-m", "unisono.cli.one_host", "-n", str(workers)),
            *(str(word) for flag in flags.items() for word in flag),
            *script,
        ]


def read_hosts(
    nnodes: int | None, node_rank: int | None, rendezvous: str | None, interface: str | None
) -> SeveralHosts | None:
    """Read the options; None where all workers are on this host.

    Raises:
        Refusal: one is missing, or does not fit.
    """
    if nnodes in (None, 1):
        others = {"--node-rank": node_rank, "--rendezvous": rendezvous, "--interface": interface}
        for name, value in others.items():
            if value not in (None, 0):
                raise Refusal(
                    f"`{name}` is for several hosts: pass `--nnodes` too, or leave it out."
                )
        return None
    assert nnodes is not None
    if node_rank is None or not 0 <= node_rank < nnodes:
        raise Refusal(
            f"`--node-rank` must be the number of this host, 0 … {nnodes - 1}, another one on each "
            f"of {nnodes}, but is {'not given' if node_rank is None else node_rank}."
        )
    hosts = SeveralHosts(nnodes, node_rank, rendezvous or "", interface)
    host, port = hosts.place
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise Refusal(
            f"`--rendezvous` must be the address of host 0 and a free port there, the same on "
            f"every host, but is {rendezvous or 'not given'}: use for example "
            f"`--rendezvous 10.0.0.1:29400`."
        )
    return hosts


def one_of_several(environ: Mapping[str, str]) -> dict[str, Any]:
    """Say which of several hosts this is, for :class:`Job`; empty where it is the only one."""
    if HOSTS_VARIABLE not in environ:
        return {}
    sizes = tuple(map(int, environ[HOSTS_VARIABLE].split(",")))
    return {"hosts": sizes, "host": int(environ["RANK"])}


def run_on_hosts(
    context: click.Context,
    hosts: SeveralHosts,
    script: Sequence[str],
    *,
    workers: int | None,
    flags: Mapping[str, object],
    threads: int,
) -> NoReturn:
    """Become torchrun on this host.

    Raises:
        Refusal: an option is for one host, or this one does not reach the rendezvous.
    """
    for parameter in context.command.params:
        is_given = context.get_parameter_source(parameter.name or "") not in (
            click.core.ParameterSource.DEFAULT,
            None,
        )
        if parameter.name in _OF_ONE_HOST and is_given:
            raise Refusal(f"`{parameter.opts[0]}` is for workers of one host: leave it out.")
    environ = hosts.environ(os.environ, threads)
    host, port = hosts.place
    try:
        address = address_here({**environ, "MASTER_ADDR": host, "MASTER_PORT": port})
    except RendezvousError as error:
        raise Refusal(str(error).replace("`MASTER_ADDR`", "`--rendezvous`")) from None
    number = num_devices() if workers is None else workers
    command = hosts.command(script, workers=number, flags=flags, address=address)
    sys.stdout.flush()
    os.execve(command[0], command, environ)
