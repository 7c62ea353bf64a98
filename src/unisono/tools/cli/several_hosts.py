"""`unisono run --nnodes`: several hosts, each with an agent that runs its launcher."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import click

from unisono.errors import RendezvousError
from unisono.runtime.procfs import NotThereError, die_with, wait_for
from unisono.runtime.signals import AGENT_ENDED
from unisono.runtime.timeouts import RENDEZVOUS, TIMEOUTS
from unisono.runtime.workers.interfaces import address_here, address_towards, is_loopback
from unisono.runtime.workers.job_store import job_name, knock, listen, place_among_tasks
from unisono.runtime.world import AGENT_VARIABLE, HOSTS_VARIABLE, cluster_task, num_devices
from unisono.tools.cli.endings import NotInTime, NumHosts, Refusal, SeveralHosts, leave

# These options apply to Unisono's launcher, which starts no workers there.
_OF_ONE_HOST = {"replaces", "workers_per_gpu", "backend"}


def read_hosts(
    nnodes: NumHosts | None, node_rank: int | None, rendezvous: str | None
) -> SeveralHosts | None:
    """Read the options, or Slurm's or Open MPI's variables; None if workers are on one host."""
    task = None if HOSTS_VARIABLE in os.environ else cluster_task(os.environ)
    if nnodes is None and task is not None and task.world_size > 1:
        place = place_among_tasks(os.environ, task.started_by)
        # Of the tasks of `srun --pty bash`, only one has a shell.
        if place is None or task.local_world_size > 1 or "SLURM_PTY_PORT" in os.environ:
            raise Refusal(
                f"`unisono run` must be started once on each host, as it starts the workers there, "
                f"but is one of {task.world_size} tasks of {task.started_by}: start the program "
                f"itself (`python`), or one `unisono run` a node (`srun --ntasks-per-node=1`, "
                f"`mpirun -N 1`); `--nnodes 1` trains here alone, as in a shell of `srun --pty`."
            )
        size = NumHosts(task.world_size, task.world_size)
        job = job_name(os.environ, task, session=0).name
        return SeveralHosts(size, task.rank, f"{place[0]}:{place[1]}", job)
    if nnodes is not None and nnodes.most == 1 and node_rank in (None, 0):
        return None  # from a script with the number of hosts in a variable
    if nnodes is None:
        if node_rank or rendezvous:
            name = "--node-rank" if node_rank else "--rendezvous"
            raise Refusal(f"`{name}` is for several hosts: pass `--nnodes` too, or leave it out.")
        return None
    if node_rank is None or not 0 <= node_rank < nnodes.most:
        raise Refusal(
            f"`--node-rank` must be the number of this host, 0 … {nnodes.most - 1}, different on "
            f"each of {nnodes.most}, but is {'not given' if node_rank is None else node_rank}: add "
            f"`--node-rank 0` on the first host, `--node-rank 1` on the next."
        )
    hosts = SeveralHosts(nnodes, node_rank, rendezvous or "")
    host, port = hosts.place
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise Refusal(
            f"`--rendezvous` must be the address of host 0 and a free port there, the same on "
            f"every host, but is {rendezvous or 'not given'}: use for example "
            f"`--rendezvous 10.0.0.1:29400`."
        )
    return hosts


def one_of_several(environ: Mapping[str, str]) -> dict[str, Any]:
    """Return this host's place among several, for :class:`Job`; empty if it is the only one.

    The launcher of one of several hosts ends with its agent.
    """
    if HOSTS_VARIABLE not in environ:
        return {}
    signal.signal(AGENT_ENDED, signal.SIG_DFL)  # nohup protects the agent alone
    agent = environ.get(AGENT_VARIABLE, "")
    if not agent.isdecimal() or not die_with(int(agent), AGENT_ENDED):
        raise Refusal(
            f"`unisono run` must be started by the agent of its host where {HOSTS_VARIABLE} is "
            f"set, but its parent is process {os.getppid()} instead of {agent or 'an agent'}: to "
            f"run a program of its own in a worker, unset {HOSTS_VARIABLE} there."
        )
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
    """Run a script on this host, as one of several."""
    for parameter in context.command.params:
        source = context.get_parameter_source(parameter.name or "")
        if parameter.name in _OF_ONE_HOST and source is not click.core.ParameterSource.DEFAULT:
            raise Refusal(f"`{parameter.opts[0]}` is for workers of one host: leave it out.")
    environ = {
        "OMP_NUM_THREADS": str(threads),
        # On stderr, torch's store only complains about names.
        "TORCH_CPP_LOG_LEVEL": "ERROR",
        **os.environ,
        "UNISONO_THREADS": str(threads),
        "CUDA_VISIBLE_DEVICES": "",
    }
    host, port = hosts.place
    try:
        for timeout in TIMEOUTS:
            timeout.in_s()  # refused here, not on workers while others wait
        address = address_here({**environ, "MASTER_ADDR": host, "MASTER_PORT": port})
        # On host 0, its own name may stand for an address such as 127.0.1.1.
        is_only_here = is_loopback(address_towards(host)) and not is_loopback(address)
        where = address if hosts.has_rendezvous and is_only_here else host
        listening = _listening(where, int(port)) if hosts.has_rendezvous else None
        if listening is None:
            _await_rendezvous(hosts)
    except KeyboardInterrupt:
        leave(128 + signal.SIGINT)
    except (ValueError, RendezvousError) as error:
        kind = NotInTime if isinstance(error.__cause__, NotThereError) else Refusal
        raise kind(str(error).replace("`MASTER_ADDR`", "`--rendezvous`")) from None
    os.environ.update(environ)
    # It loads torch, which reads these variables.
    from unisono.tools.cli.hosts_agent import HostAgent

    agent = HostAgent(
        [*(str(word) for flag in flags.items() for word in flag), *script],
        num_devices() if workers is None else workers,
        int(str(flags["--restarts"])),
        hosts,
        (where, int(port)),
        listening,
        await_first=lambda: _await_rendezvous(hosts),
    )
    leave(agent.run())


def _listening(where: str, port: int) -> socket.socket:
    """Listen at the rendezvous, which is on this host."""
    try:
        return listen(where, port)
    except OSError as error:
        raise RendezvousError(
            f"`--rendezvous` must be an address of host 0, which this is, and a free port on it, "
            f"but {where} at port {port} is not ({error}): pass others, or this host's "
            f"`--node-rank`."
        ) from error


def _await_rendezvous(hosts: SeveralHosts) -> None:
    """Wait until the rendezvous on another host is there."""
    (host, port), timeout_s = hosts.place, RENDEZVOUS.in_s()
    who, whether = "host 0", "`unisono run` was started on it, with the same `--rendezvous`"
    if hosts.name:
        who, whether = "a store", "it was started there"

    def late(error: NotThereError) -> Exception:
        return RendezvousError(
            f"{who} must be at {hosts.rendezvous} within {timeout_s:g} s, but {error}: check "
            f"whether {whether}; {RENDEZVOUS.variable} waits longer (s)."
        )

    told = f"host {hosts.node_rank}", f"at {hosts.rendezvous} for {who}"
    wait_for(lambda _: knock(host, int(port)), timeout_s, late, told)
