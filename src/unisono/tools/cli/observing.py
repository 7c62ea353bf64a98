"""`unisono plan` and `unisono verify`: run a program in a copy of its folder, and observe it."""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import click

from unisono.tools.cli.endings import (
    COUNT,
    Refusal,
    Text,
    answering,
    copying_folder,
    leave,
    refusing,
    seconds,
    takes_script,
)

_BANDWIDTH = "10Gbit/s"


def _counts(text: str) -> tuple[int, ...]:
    counts = sorted({int(word) for word in text.split(",")})
    if counts[0] < 1:
        raise ValueError(text)
    return tuple(counts)


def _bytes_per_second(text: str) -> float:
    match = re.fullmatch(r"(\d+(?:\.\d+)?) ?([kMGT])bit/s", text)
    if match is None or not float(match[1]):
        raise ValueError(text)
    return float(match[1]) * 1000.0 ** (1 + "kMGT".index(match[2])) / 8


timeout = click.option(
    "--timeout",
    "timeout_s",
    type=seconds("600"),
    default="300",
    show_default=True,
    help="The time after which a run of the program is ended.",
)
_WORKERS = Text("list", _counts, "numbers of workers of at least 1", "1,2,4")
_RATE = Text("rate", _bytes_per_second, "kbit/s, Mbit/s, Gbit/s or Tbit/s above 0", _BANDWIDTH)


@click.command(
    context_settings={"allow_interspersed_args": False},
    short_help="Time steps on 1, 2, 4, … workers.",
)
@click.option(
    "--workers",
    "counts",
    type=_WORKERS,
    help="The numbers of workers to time: 1, 2, 4, … and as many as this machine has cores "
    "or GPUs by default. One worker is always timed.",
)
@click.option(
    "--hosts",
    type=COUNT,
    help="Also compute, by a formula, the speed on so many hosts like this one.",
)
@click.option(
    "--bandwidth",
    type=_RATE,
    help=f"The bandwidth of each host's link, in each direction; {_BANDWIDTH} by default.",
)
@click.option(
    "--seconds",
    "timing_s",
    type=seconds("5"),
    default="5",
    show_default=True,
    help="How long to time steps on each number of workers, each of two times.",
)
@timeout
@click.option("--json", "as_json", is_flag=True, help="Print the answer as JSON.")
@takes_script
@answering()
def plan(
    kind: str,
    script: str,
    args: tuple[str, ...],
    counts: Sequence[int] | None,
    hosts: int | None,
    bandwidth: float | None,
    timing_s: float,
    timeout_s: float,
    as_json: bool,
) -> None:
    """Time SCRIPT on 1, 2, 4, … workers of this machine, and say what limits it.

    Some steps of SCRIPT, which trains with unisono.Trainer or unisono.Run, run on each number of
    workers, in turns, twice. SCRIPT is not edited. It runs in a copy of the working folder, which
    is deleted, prints nothing, and is ended after some steps.

    \b
    Examples:
      unisono plan train.py --lr 0.1                 --lr goes to the script
      unisono plan --workers 1,2,3 train.py
      unisono plan --hosts 4 --bandwidth 25Gbit/s train.py

    \b
    Exit status:
      0     timed
      2     steps could not be timed, or the command line was wrong
      130   Ctrl-C; 143 SIGTERM
    """
    from unisono.runtime.console import Output
    from unisono.runtime.launch.placement import Machine, place_workers
    from unisono.runtime.notices import say
    from unisono.runtime.world import threads_per_worker
    from unisono.tools.plan.efficiency import PlanAnswer, measure_steps, on_hosts
    from unisono.tools.verify.recorder import Limits
    from unisono.tools.verify.trials import Program

    if bandwidth is not None and hosts is None:
        raise Refusal(
            "`--bandwidth` must be that of links between hosts, but there is one host: add for "
            "example `--hosts 2`."
        )
    with refusing():
        threads = threads_per_worker()
        most = max(counts) if counts else None
        placement = place_workers(most, None, os.environ, Machine.here())
        cores = max(1, len(os.sched_getaffinity(0)) // threads)
        if not counts:
            most = placement.num_workers if placement.gpus else cores
            counts = [*(2**power for power in range(most.bit_length()) if 2**power < most), most]
        program = Program(kind, script, args, Path.cwd())
        limits = Limits(timing_s=timing_s, timeout_s=timeout_s, threads=threads)
        environ = {**os.environ, **placement.variables}
        with copying_folder():
            measured = measure_steps(program, sorted({1, *counts}), limits, environ, say)
        rate = bandwidth or _bytes_per_second(_BANDWIDTH)
        found = None if hosts is None else on_hosts(measured, hosts, rate)
    answer = PlanAnswer(script, measured, max(counts), found)
    with contextlib.suppress(BrokenPipeError):
        if as_json:
            click.echo(json.dumps(answer.as_json, ensure_ascii=False, allow_nan=False))
        else:
            answer.print(Output())
    leave(0)


@click.command(
    context_settings={"allow_interspersed_args": False},
    short_help="Check that N ranks train as one.",
)
@click.option(
    "-n",
    "workers",
    type=COUNT,
    default="2",
    show_default=True,
    metavar="RANKS",
    help="How many ranks to compare with one; at least 2.",
)
@click.option(
    "--steps",
    type=COUNT,
    default="24",
    show_default=True,
    help="The number of an optimizer's steps after which the program is stopped.",
)
@timeout
@click.option(
    "--resume",
    "resumes",
    is_flag=True,
    help="Stop the program at several steps instead, start it again, and compare every bit with an "
    "undisturbed run.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the findings as JSON.")
@takes_script
@answering()
def verify(
    kind: str,
    script: str,
    args: tuple[str, ...],
    workers: int,
    steps: int,
    timeout_s: float,
    resumes: bool,
    as_json: bool,
) -> None:
    """Check that SCRIPT trains the same on several ranks as on one.

    SCRIPT is any program that trains with torch: DistributedDataParallel, Accelerate, Lightning
    Fabric, gradients averaged by hand, or Unisono. It is not edited. A few steps run on RANKS
    ranks and on one, with the same samples, and what happens is compared: samples, gradients,
    parameters, buffers, learning rates, random numbers, evaluation.

    The program runs in a copy of the working folder, which is deleted, and prints nothing. It
    starts as under torchrun: RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT are set.

    \b
    Examples:
      unisono verify train.py --lr 0.1        two ranks against one; --lr goes to the script
      unisono verify -n 4 train.py            four ranks against one
      unisono verify --json train.py > a.json
      unisono verify --resume -n 2 train.py   does it resume with the same bits?

    \b
    Exit status:
      0     equal, but for rounding
      1     different: the first ✗ is the cause
      2     could not be verified, or the command line was wrong
      130   Ctrl-C; 143 SIGTERM
    """
    from unisono.runtime.console import Output
    from unisono.runtime.notices import say
    from unisono.tools.verify.findings import print_findings, summary
    from unisono.tools.verify.recorder import Limits
    from unisono.tools.verify.trials import Program
    from unisono.tools.verify.verifier import verify as verify_program

    if workers < 2 and not resumes:
        raise Refusal(
            "`-n` must be at least 2, as ranks are compared with one, but is 1: use for example "
            "`-n 2`."
        )
    with refusing():
        program = Program(kind, script, args, Path.cwd())
        limits = Limits(steps=steps, timeout_s=timeout_s)
        with copying_folder():
            verdict = verify_program(program, workers, limits, os.environ, say, resumes=resumes)
    if verdict.interrupted_by is not None:
        leave(128 + verdict.interrupted_by)
    if verdict.trouble:
        say(verdict.trouble)
    with contextlib.suppress(BrokenPipeError):
        if as_json:
            findings = [asdict(finding) for finding in verdict.findings]
            answer = {"program": script, "world_sizes": verdict.world_sizes, "findings": findings}
            click.echo(json.dumps(answer, indent=2, ensure_ascii=False))
        else:
            console = Output()
            print_findings(console, verdict.findings)
            console.print(summary(script, verdict), soft_wrap=True, markup=False)
    leave(verdict.status)
