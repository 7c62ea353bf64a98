"""The command line: parse, call, exit code."""

from __future__ import annotations

import contextlib
import io
import math
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import click

import unisono
from unisono.c10d.gloo import GLOO, check_backend
from unisono.errors import UnisonoError
from unisono.faults import FAULTS_VARIABLE, read_faults
from unisono.launch.environment import launch_environment
from unisono.launch.gpus import IN_SHELL
from unisono.launch.job import MODULE, SCRIPT, Job, too_many_workers
from unisono.launch.placement import Asked, Machine, place_workers
from unisono.launch.recovery import RESTARTS
from unisono.launch.run_script import run as run_workers
from unisono.launch.stalls import TIMEOUT_S
from unisono.launch.standard import open_standard_fds
from unisono.world import threads_per_worker


class _Refusal(click.ClickException):
    """Wrong input, told in one sentence."""

    exit_code = 2

    def show(self, file: Any = None) -> None:
        click.echo(f"unisono: {self.message}", file=file or sys.stderr)


class _Unsaid(_Refusal):
    """What was to be printed could not be, told in one sentence."""

    exit_code = 1


class _Commands(click.Group):
    """The commands; whatever they do, descriptors 0 to 2 are open before."""

    def main(self, *args: Any, **kwargs: Any) -> Any:
        open_standard_fds()
        return super().main(*args, **kwargs)


@contextlib.contextmanager
def _refusing() -> Iterator[None]:
    """Say in one sentence what is refused."""
    try:
        yield
    except (ValueError, UnisonoError) as error:
        raise _Refusal(str(error)) from None


def _option(read: Callable[[str], Any], must: str, example: str) -> Callable[..., Any]:
    """Make the callback of an option whose text `read` refuses with a ValueError."""

    def callback(context: click.Context, param: click.Parameter, value: str | None) -> Any:
        option = param.opts[0]
        try:
            return None if value is None else read(value)
        except ValueError:
            raise _Refusal(
                f"`{option}` must be {must}, but is {value!r}: use for example "
                f"`{option} {example}`."
            ) from None

    return callback


def _positive(text: str) -> int:
    if int(text) < 1:
        raise ValueError
    return int(text)


def _not_negative(text: str) -> int:
    if not text.isdecimal():
        raise ValueError
    return int(text)


def _seconds(text: str) -> float:
    if not 0 < float(text) < math.inf:
        raise ValueError
    return float(text)


_count = _option(_positive, "a whole number of at least 1", "2")


def _num_workers(context: click.Context, param: click.Parameter, value: str | None) -> int | None:
    """Read a number of workers that a machine may be asked for."""
    count: int | None = _count(context, param, value)
    if count is not None and (reason := too_many_workers(param.opts[0], count)):
        raise _Refusal(reason)
    return count


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(unisono.__version__, prog_name="unisono")
def main() -> None:
    """Train on all devices of this machine, with the same result on any number of them.

    A script that trains with unisono.Trainer runs alone with `python`, and on several workers
    with `unisono run`. The weights it ends with are the same, bit for bit.

    \b
    Examples:
      unisono run train.py                 one worker for each device
      unisono run -n 2 train.py --lr 0.1   two workers; --lr goes to the script
      unisono verify -n 2 ddp.py           do two ranks of any torch program equal one?
      unisono top runs/mnist               watch a run, live
      unisono where runs/mnist             which line is every rank at?
      unisono report runs/mnist            draw what happened in it
      unisono run --help                   all about it
    """


@main.command(
    context_settings={"allow_interspersed_args": False},
    short_help="Run a script on several workers.",
)
@click.option(
    "-n",
    "workers",
    callback=_num_workers,
    metavar="WORKERS",
    help="How many workers to start. Without it: one for each GPU; without a GPU, one for each "
    "core, at most 8.",
)
@click.option(
    "--threads",
    callback=_count,
    metavar="N",
    help="How many threads each worker computes with; UNISONO_THREADS by default, else 1. "
    "The number changes the bits of a result, so it does not depend on the number of workers.",
)
@click.option(
    "--restarts",
    callback=_option(_not_negative, "a whole number of at least 0", str(RESTARTS)),
    default=str(RESTARTS),
    show_default=True,
    metavar="N",
    help="How many workers may be lost within a minute; one more ends the run with the first "
    "failure's explanation. 0: none, and no memory is spent on snapshots.",
)
@click.option(
    "--no-replace",
    "replaces",
    is_flag=True,
    flag_value=False,
    default=True,
    help="Go on without a worker that is lost, instead of starting another in its place.",
)
@click.option(
    "--stall-timeout",
    "stall_timeout_s",
    callback=_option(_seconds, "a number of seconds above 0", f"{TIMEOUT_S:.0f}"),
    default=f"{TIMEOUT_S:.0f}",
    show_default=True,
    metavar="SECONDS",
    help="How long a worker that others wait for may stand still before it is ended and made up "
    "for.",
)
@click.option(
    "--gpus",
    metavar="LIST",
    help="The GPUs that workers see, such as `0,3`: numbers or names as `nvidia-smi -L` shows "
    "them, `all`, or `none` for workers on the CPU. Without it, as CUDA_VISIBLE_DEVICES says. "
    "Worker 0 takes the first, and so on; a script that chooses its GPU itself calls "
    "torch.cuda.set_device(LOCAL_RANK).",
)
@click.option(
    "--workers-per-gpu",
    callback=_count,
    metavar="N",
    help="How many workers share each GPU, for small models and tests; UNISONO_WORKERS_PER_GPU by "
    "default, else 1. Worker LOCAL_RANK takes GPU LOCAL_RANK // N.",
)
@click.option(
    "--stages",
    callback=_count,
    default="1",
    metavar="N",
    help="How many workers compute one replica of the model together, each a part of it; N must "
    "divide the number of workers. The result stays the same.",
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
    "--debug",
    is_flag=True,
    help="Have torch compare what ranks call (TORCH_DISTRIBUTED_DEBUG=DETAIL), and show where "
    "native code fails. Slower.",
)
@click.option(
    "-m", "is_module", is_flag=True, help="SCRIPT is the name of a module, as in `python -m`."
)
@click.argument("script", default="")
@click.argument("args", nargs=-1, type=click.UNPROCESSED)
def run(
    script: str,
    args: tuple[str, ...],
    workers: int | None,
    threads: int | None,
    is_module: bool,
    restarts: int,
    replaces: bool,
    stall_timeout_s: float,
    gpus: str | None,
    workers_per_gpu: int | None,
    debug: bool,
    backend: str,
    stages: int,
) -> None:
    """Run SCRIPT with its ARGS on several workers of this machine.

    Every worker is a Python process that runs the script as `python SCRIPT ARGS` would. All that
    stands behind SCRIPT goes to the script, dashes included.

    A worker that is killed, or that stands still, costs a run with unisono.Trainer nothing: the
    others go on, a replacement joins them, and the result is the same. If one fails with an
    exception, the others are ended and the failure is shown once, with its rank.

    A script that makes process groups itself, with torch.distributed.init_process_group, runs as
    it is: RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT are set, every `init_method`
    works, whichever port it names, and nothing listens beyond this machine.

    Ctrl-C and SIGTERM finish the step, write a checkpoint where the script has a `directory` for
    it, and end all workers; the second one ends them at once.

    \b
    Examples:
      unisono run train.py                       one worker for each device
      unisono run -n 4 train.py --epochs 3       four workers
      unisono run -n 2 --threads 4 train.py      two workers with four threads each
      unisono run -n 2 -m package.train          a module instead of a file
      unisono run --gpus 0,3 train.py            two workers, each with a GPU
      unisono run --workers-per-gpu 2 train.py   two workers for each GPU
      unisono run --gpus none train.py           on the CPU, one worker for each core
      unisono run -n 4 --stages 2 train.py       two replicas, each cut in two
      unisono run --backend unisono ddp.py       its gloo groups run on our backend

    \b
    Exit status:
      0     every worker ended well
      1     an uncaught exception, or what the script passed to sys.exit
      2     the command line was wrong; nothing was started
      130   Ctrl-C; 143 SIGTERM; 128 + N a worker was killed by signal N
    """
    if not is_module or not script:
        _check_script(script)
    with _refusing():
        read_faults(os.environ.get(FAULTS_VARIABLE, ""))
        check_backend("--backend", backend)
        asked = Asked(workers, gpus, workers_per_gpu, stages)
        placement = place_workers(IN_SHELL, asked, os.environ, Machine.here())
        threads = threads_per_worker() if threads is None else threads
    command = ["unisono", *sys.argv[1:]]
    job = Job(
        kind=MODULE if is_module else SCRIPT,
        target=script,
        argv=args,
        environ=launch_environment(os.environ, command, placement.variables, debug=debug),
        num_workers=placement.num_workers,
        num_gpus=len(placement.gpus),
        on_cpu=placement.on_cpu,
        threads=threads,
        restarts=restarts,
        replaces=replaces,
        stall_timeout_s=stall_timeout_s,
        backend=backend,
        stages=stages,
    )
    _leave(run_workers(job))


@main.command(
    context_settings={"allow_interspersed_args": False},
    short_help="Check that N ranks train as one.",
)
@click.option(
    "-n",
    "workers",
    callback=_num_workers,
    default="2",
    show_default=True,
    metavar="RANKS",
    help="How many ranks to compare with one; at least 2.",
)
@click.option(
    "--steps",
    callback=_count,
    default="24",
    show_default=True,
    metavar="N",
    help="After how many steps of an optimizer the program is stopped.",
)
@click.option(
    "--timeout",
    "timeout_s",
    callback=_option(_seconds, "a number of seconds above 0", "600"),
    default="300",
    show_default=True,
    metavar="SECONDS",
    help="After how long a run of the program is ended.",
)
@click.option(
    "--resume",
    "resumes",
    is_flag=True,
    help="Stop the program at several steps instead, start it again, and compare every bit with an "
    "undisturbed run.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the findings as JSON.")
@click.option(
    "-m", "is_module", is_flag=True, help="SCRIPT is the name of a module, as in `python -m`."
)
@click.argument("script", default="")
@click.argument("args", nargs=-1, type=click.UNPROCESSED)
def verify(
    script: str,
    args: tuple[str, ...],
    workers: int,
    steps: int,
    timeout_s: float,
    resumes: bool,
    as_json: bool,
    is_module: bool,
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
      unisono verify --resume -n 2 train.py   does it go on from its checkpoints with the same bits?

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
    from unisono.verify.findings import NOT_VERIFIED, status_of
    from unisono.verify.findings import as_json as json_of
    from unisono.verify.findings_table import print_table
    from unisono.verify.replay import verify_resume
    from unisono.verify.trials import Limits, Program
    from unisono.verify.verifier import verify as verify_program

    if not is_module or not script:
        _check_script(script)
    if workers < 2 and not resumes:
        raise _Refusal(
            "`-n` must be at least 2, as ranks are compared with one, but is 1: use for example "
            "`-n 2`."
        )
    with _refusing():
        program = Program(MODULE if is_module else SCRIPT, script, args, Path(working_folder()))
        limits = Limits(steps=steps, timeout_s=timeout_s)
        try:
            ask = verify_resume if resumes else verify_program
            verdict = ask(program, workers, limits, os.environ, say)
        except OSError as error:
            raise _Refusal(
                f"a folder for temporary files must take a copy of the working folder, but "
                f"{error.filename or 'it'!r} does not ({error.strerror}): make room, or set TMPDIR."
            ) from None
    if verdict.interrupted_by is not None:
        _leave(128 + verdict.interrupted_by)
    if verdict.trouble:
        say(verdict.trouble)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # not every terminal knows every letter
    with _saying():
        if as_json:
            click.echo(json_of(script, verdict.world_sizes, verdict.findings))
        else:
            exact = verdict.is_exact
            print_table(Console(), script, verdict.world_sizes, verdict.findings, is_exact=exact)
    # Equal as far as it ran is not equal.
    _leave(status_of(verdict.findings) or (NOT_VERIFIED if verdict.trouble else 0))


@main.command(short_help="List the checkpoints of a run.")
@click.argument("directory")
def checkpoints(directory: str) -> None:
    """List the checkpoints in DIRECTORY, newest first, each checked to the last byte.

    DIRECTORY is what the script passed as `Trainer(..., directory=...)`. A run that starts again
    goes on from the first line that says "whole".

    \b
    Example:
      unisono checkpoints runs/mnist
    """
    from unisono.checkpoint.run_directory import RunDirectory
    from unisono.report.follow import run_folder

    try:
        with _refusing():
            entries = RunDirectory(run_folder(directory)).entries()
    except OSError as error:
        raise _Refusal(
            f"the checkpoints in DIRECTORY must be readable, but {error.filename!r} is not: "
            f"{error.strerror}."
        ) from None
    with _saying():
        for entry in entries:
            state = f"whole, {entry.num_bytes:,} bytes"
            if entry.trouble:
                state = f"damaged: {entry.trouble}"
            click.echo(f"{entry.path.name}  {state}")
        if not entries:
            click.echo(f"no checkpoints in {directory}")


@main.command(short_help="Watch a run, live.")
@click.option("--once", is_flag=True, help="Print how it stands, and end; so in a pipe, too.")
@click.argument("directory")
def top(directory: str, once: bool) -> None:
    """Show the run in DIRECTORY: one line for each worker, until it has ended or Ctrl-C.

    DIRECTORY is what the script passes as `Trainer(..., directory=...)`. Nothing is written there,
    and the run takes no notice.

    Each line has a worker's step, the phase that takes most of its time and a bar of all six, its
    time a step without waiting for others, and, where the run is on this machine, the state of
    its process, its memory and its share of a core. `!` is a worker that the others wait for.

    \b
    Examples:
      unisono top runs/mnist           live, twice a second
      unisono top --once runs/mnist    once, for a script
    """
    from rich.console import Console

    from unisono.report.top import show

    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # not every terminal knows every letter
    with _refusing(), _saying():
        show(directory, Console(), once=once)


@main.command(short_help="Show where each rank is, and who waits for whom.")
@click.argument("target", metavar="DIRECTORY|PID")
def where(target: str) -> None:
    """Show where every rank of a job is right now: its function and line, and its stack.

    DIRECTORY is what the script passes as `Trainer(..., directory=...)`; PID is the launcher, any
    worker, or torchrun. If ranks wait for one that has not come, the first line says for which.

    Nothing in the job is stopped or slowed down for it. Stacks are read from outside with py-spy,
    so a rank may just as well be stopped, or busy in native code.

    \b
    Examples:
      unisono where runs/mnist
      unisono where 4711
    """
    from unisono.hangs import where as finding

    with _refusing():
        text = finding.where(_process_of(target), os.getcwd())
    with _saying():
        click.echo(text)


def _process_of(target: str) -> int:
    """Find the process that a number is, or that works in a run's folder.

    Raises:
        ValueError: there is no such folder, or no run is under way in it.
    """
    from pathlib import Path

    from unisono.checkpoint.directory_lock import holder_of
    from unisono.report.follow import run_folder

    if target.isdecimal() and not os.path.isdir(target):
        return int(target)
    pid = holder_of(Path(run_folder(target)))
    if pid is None:
        raise ValueError(
            f"DIRECTORY must be that of a run that is under way on this machine, but nothing works "
            f"in {target!r}: `unisono top --once {target}` shows how the run ended, and a PID "
            "names any other job."
        )
    return pid


@main.command(short_help="Draw what happened in a run.")
@click.argument("directory")
@click.option(
    "-o",
    "--output",
    metavar="FILE",
    help="The page to write; report.html in DIRECTORY by default.",
)
@click.option(
    "--trace",
    metavar="FILE",
    help="Also write the steps of each worker as a trace, for https://ui.perfetto.dev and "
    "chrome://tracing.",
)
def report(directory: str, output: str | None, trace: str | None) -> None:
    """Draw what happened in DIRECTORY as one page for a browser.

    DIRECTORY is what the script passed as `Trainer(..., directory=...)`; the run may be under way.
    The page shows metrics, speed, where the time went, what each worker did, what went wrong, and
    how to get the same result. It holds all that it shows and asks the network for nothing.

    \b
    Examples:
      unisono report runs/one                        writes runs/one/report.html
      unisono report runs/one -o page.html
      unisono report runs/one --trace trace.json
    """
    from unisono.report.files import write_report

    with _refusing():
        paths = write_report(directory, output, trace)
    with _saying():
        for path in paths:
            click.echo(path)


@main.command(short_help="Draw several runs together.")
@click.argument("directories", nargs=-1, metavar="DIRECTORY DIRECTORY...")
@click.option(
    "-o",
    "--output",
    metavar="FILE",
    default="compare.html",
    show_default=True,
    help="The page to write.",
)
def compare(directories: tuple[str, ...], output: str) -> None:
    """Draw the runs in several DIRECTORIES together, as one page for a browser.

    The page shows their curves, says where the runs differ in what fixes the result, and whether
    they ended with the same digest.

    \b
    Example:
      unisono compare runs/one runs/two -o page.html
    """
    from unisono.report.files import write_comparison

    with _refusing():
        path = write_comparison(directories, output)
    with _saying():
        click.echo(path)


@contextlib.contextmanager
def _saying() -> Iterator[None]:
    """Tell in one sentence that standard output takes nothing; click is quiet after `| head`."""
    try:
        yield
    except BrokenPipeError:
        raise
    except OSError as error:
        if error.filename is not None:
            raise  # of a file, and so not of standard output
        # Else Python would try once more in the end, and complain in its own words.
        with open(os.devnull, "wb") as nowhere:
            os.dup2(nowhere.fileno(), sys.stdout.fileno())
        raise _Unsaid(
            f"standard output must take what is printed, but does not ({error.strerror}): make "
            "room, or lead it elsewhere."
        ) from None


def _check_script(script: str) -> None:
    if not script:
        raise _Refusal(
            "SCRIPT must be a Python file, but none is named: use for example "
            "`unisono run -n 2 train.py`, and see `unisono run --help`."
        )
    if os.path.isdir(script):
        raise _Refusal(
            f"SCRIPT must be a Python file, but {script!r} is a folder: "
            "name a file in it, or use `-m` with the name of a package."
        )
    if not os.path.exists(script):
        raise _Refusal(
            f"SCRIPT must be a Python file, but {script!r} does not exist in {os.getcwd()!r}: "
            "check its name, or use `-m` for a module."
        )
    if not os.path.isfile(script):
        raise _Refusal(
            f"SCRIPT must be a file that every worker can read from its beginning, but {script!r} "
            "is a pipe or a device: write it into a file first."
        )
    if not os.access(script, os.R_OK):
        raise _Refusal(
            f"SCRIPT must be a file you may read, but {script!r} is not: change its permissions."
        )


def _leave(status: int) -> NoReturn:
    """End at once: everything is written, and there is nothing to take down."""
    for stream in (sys.stdout, sys.stderr):
        # A script's output has been read by somebody who is gone, say; the status stands.
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(status)


if __name__ == "__main__":
    main()
