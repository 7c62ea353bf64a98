"""`unisono verify`."""

from __future__ import annotations

import os

import click

from unisono.cli.endings import Refusal, copying_folder, leave, refusing, saying
from unisono.cli.options import COUNT, WORKERS, takes_script, timeout


@click.command(
    context_settings={"allow_interspersed_args": False},
    short_help="Check that N ranks train as one.",
)
@click.option(
    "-n",
    "workers",
    type=WORKERS,
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
    help="After how many steps of an optimizer the program is stopped.",
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
    from pathlib import Path

    from rich.console import Console

    from unisono.launch.job import working_folder
    from unisono.notices import say
    from unisono.verify.findings import as_json as json_of
    from unisono.verify.findings import print_table
    from unisono.verify.recorder import Limits
    from unisono.verify.trials import Program
    from unisono.verify.verifier import verify as verify_program
    from unisono.verify.verifier import verify_resume

    if workers < 2 and not resumes:
        raise Refusal(
            "`-n` must be at least 2, as ranks are compared with one, but is 1: use for example "
            "`-n 2`."
        )
    with refusing():
        program = Program(kind, script, args, Path(working_folder()))
        limits = Limits(steps=steps, timeout_s=timeout_s)
        ask = verify_resume if resumes else verify_program
        with copying_folder():
            verdict = ask(program, workers, limits, os.environ, say)
    if verdict.interrupted_by is not None:
        leave(128 + verdict.interrupted_by)
    if verdict.trouble:
        say(verdict.trouble)
    with saying():
        if as_json:
            click.echo(json_of(script, verdict))
        else:
            print_table(Console(), script, verdict)
    leave(verdict.status)
