"""`unisono run`."""

from __future__ import annotations

import os
import sys

import click

from unisono.runtime.c10d.registration import GLOO, check_backend
from unisono.runtime.faults import FAULTS_VARIABLE, read_faults
from unisono.runtime.launch.api import run as run_workers
from unisono.runtime.launch.exceptions import TRACEBACK_VARIABLE
from unisono.runtime.launch.job import MODULE, Job, launch_environment
from unisono.runtime.launch.placement import Machine, crowded, place_workers
from unisono.runtime.launch.recovery import RESTARTS
from unisono.runtime.notices import say
from unisono.runtime.timeouts import STALL
from unisono.runtime.world import threads_per_worker
from unisono.tools.cli.endings import (
    COUNT,
    NOT_NEGATIVE,
    NUM_HOSTS,
    THREADS,
    NumHosts,
    leave,
    refusing,
    seconds,
    takes_script,
)
from unisono.tools.cli.several_hosts import one_of_several, read_hosts, run_on_hosts


@click.command(
    context_settings={"allow_interspersed_args": False},
    short_help="Run a script on several workers.",
)
@click.option(
    "-n",
    "workers",
    type=COUNT,
    metavar="WORKERS",
    help="How many workers to start. Without it: one for each GPU; without a GPU, one for each "
    "core, at most 8.",
)
@click.option(
    "--threads",
    type=THREADS,
    help="How many threads each worker computes with; UNISONO_THREADS by default, else 1. "
    "The number changes the bits of a result, so it does not depend on the number of workers.",
)
@click.option(
    "--restarts",
    type=NOT_NEGATIVE,
    default=str(RESTARTS),
    show_default=True,
    help="How many workers may be lost within a minute; one more ends the run, and the first "
    "failure is shown. 0: none, and no memory is spent on snapshots.",
)
@click.option(
    "--no-replace",
    "replaces",
    is_flag=True,
    flag_value=False,
    default=True,
    help="Do not replace lost workers: the remaining ones continue without them.",
)
@click.option(
    "--stall-timeout",
    "stall_timeout_s",
    type=seconds(f"{STALL.default_s:.0f}"),
    default=f"{STALL.default_s:.0f}",
    envvar=STALL.variable,
    show_default=True,
    help="How long a worker that others wait for may make no progress before it is killed and "
    "replaced.",
)
@click.option(
    "--workers-per-gpu",
    type=COUNT,
    help="How many workers share each GPU, for small models and tests; UNISONO_WORKERS_PER_GPU by "
    "default, else 1. Worker LOCAL_RANK takes GPU LOCAL_RANK // N.",
)
@click.option(
    "--nnodes",
    type=NUM_HOSTS,
    help="How many hosts compute together, or as 1:2 how many at least and at most. Run the same "
    "command on each, with its own `--node-rank`; after a loss all begin again once enough hosts "
    "are there, and again when another comes.",
)
@click.option(
    "--node-rank",
    type=NOT_NEGATIVE,
    help="With `--nnodes`: the number of this host, from 0.",
)
@click.option(
    "--rendezvous",
    metavar="HOST:PORT[/NAME]",
    help="With `--nnodes`: the address of host 0, and a free port there; or that of a store which "
    "you have started elsewhere, and a new name for the run in it. UNISONO_INTERFACE names the "
    "interface on which this host talks to the others, if not the one that reaches it.",
)
@click.option(
    "--backend",
    default=GLOO,
    show_default=True,
    metavar="NAME",
    help="What runs the script's gloo process groups: gloo or unisono, Unisono's own backend. "
    "torch reports both as gloo, the only backend that many libraries accept on CPUs.",
)
@click.option(
    "--traceback",
    "shows_all",
    is_flag=True,
    help="Also show Unisono's own frames in tracebacks; otherwise they are one line.",
)
@takes_script
@click.pass_context
def run(
    context: click.Context,
    kind: str,
    script: str,
    args: tuple[str, ...],
    workers: int | None,
    threads: int | None,
    restarts: int,
    replaces: bool,
    stall_timeout_s: float,
    workers_per_gpu: int | None,
    backend: str,
    nnodes: NumHosts | None,
    node_rank: int | None,
    rendezvous: str | None,
    shows_all: bool,
) -> None:
    """Run SCRIPT with its ARGS on several workers of this machine, or of several.

    Every worker is a Python process that runs the script as `python SCRIPT ARGS` would. Everything
    after SCRIPT is passed to the script, options included.

    If a script trains with unisono.Trainer, a worker that is killed or hangs is replaced: the
    others continue, and the result is the same. If a worker raises an exception, the others are
    ended, and the failure is shown once, with its rank.

    A script that calls torch.distributed.init_process_group runs as it is: RANK, WORLD_SIZE,
    LOCAL_RANK, MASTER_ADDR and MASTER_PORT are set, every `init_method` and every port works, and
    nothing listens beyond this machine.

    Ctrl-C, SIGTERM, SIGUSR1, SIGUSR2 and SIGHUP finish the step, write a checkpoint if the script
    has a `directory`, and end all workers, with `--nnodes` on all hosts. A second one, two seconds
    later or more, ends them at once.

    \b
    Examples:
      unisono run train.py                       one worker for each device
      unisono run -n 4 train.py --epochs 3       four workers
      unisono run -n 2 --threads 4 train.py      two workers with four threads each
      unisono run -n 2 -m package.train          a module instead of a file
      unisono run --workers-per-gpu 2 train.py   two workers for each GPU
      unisono run --backend unisono ddp.py       its gloo groups run on our backend
      CUDA_VISIBLE_DEVICES=0,3 unisono run train.py    two workers, each with a GPU
      CUDA_VISIBLE_DEVICES= unisono run train.py       on the CPU, one worker for each core
      unisono run --nnodes 2 --node-rank 0 --rendezvous 10.0.0.1:29400 train.py

    \b
    Exit status:
      0     every worker ended well
      1     an uncaught exception, or what the script passed to sys.exit
      2     the command line was wrong; nothing was started
      130   Ctrl-C; 143 SIGTERM; 128 + N signal N, to this command or to a worker that it killed
    """
    if shows_all:
        os.environ[TRACEBACK_VARIABLE] = "1"
    with refusing():
        hosts = read_hosts(nnodes, node_rank, rendezvous)
    if hosts is not None:
        with refusing():
            read_faults(os.environ.get(FAULTS_VARIABLE, ""))
            threads = threads_per_worker() if threads is None else threads
        called = [*(["-m"] if kind == MODULE else []), script, *args]
        flags = {"--restarts": restarts, "--stall-timeout": stall_timeout_s}
        run_on_hosts(context, hosts, called, workers=workers, flags=flags, threads=threads)
    with refusing():
        read_faults(os.environ.get(FAULTS_VARIABLE, ""))
        check_backend(backend)
        placement = place_workers(workers, workers_per_gpu, os.environ, Machine.here())
        threads = threads_per_worker() if threads is None else threads
    if line := crowded(placement.num_workers, len(os.sched_getaffinity(0))):
        say(line)
    command = ["unisono", *sys.argv[1:]]
    job = Job(
        kind=kind,
        target=script,
        argv=args,
        environ=launch_environment(os.environ, command, placement.variables),
        num_workers=placement.num_workers,
        threads=threads,
        restarts=restarts,
        replaces=replaces,
        stall_timeout_s=stall_timeout_s,
        backend=backend,
        **one_of_several(os.environ),
    )
    leave(run_workers(job))
