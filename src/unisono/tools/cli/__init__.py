"""The command line: parse, call, exit code. One file for each command or group of commands."""

from __future__ import annotations

import contextlib
import io
import shlex
import sys
from collections.abc import Iterator
from typing import Any

import click
from typing_extensions import override

import unisono
from unisono.runtime.launch.program import open_standard_fds
from unisono.tools.cli.endings import Refusal, describe_system_error
from unisono.tools.cli.first_commands import demo, new
from unisono.tools.cli.observing import plan, verify
from unisono.tools.cli.run_command import run
from unisono.tools.cli.views import checkpoints, compare, doctor, explain, report, top, where


@contextlib.contextmanager
def _in_one_sentence() -> Iterator[None]:
    """Shorten click's four-line errors to one sentence; without arguments, click shows the help."""
    try:
        yield
    except click.UsageError as error:
        if type(error).__name__ == "NoArgsIsHelpError":
            raise
        names = [] if error.ctx is None else error.ctx.command_path.split()[1:]
        command = " ".join(["unisono", *names])
        told, _, meant = error.format_message().rstrip(".").partition(". Did you mean ")
        meant = f"did you mean {meant}" if meant else f"see `{command} --help`."
        raise Refusal(f"{told[:1].lower()}{told[1:]}: {meant}") from None


class _Commands(click.Group):
    """The commands; descriptors 0 to 2 are open, and output in any encoding succeeds."""

    def main(self, *args: Any, **kwargs: Any) -> Any:
        open_standard_fds()
        if isinstance(sys.stdout, io.TextIOWrapper):
            sys.stdout.reconfigure(errors="replace")
        return super().main(*args, **kwargs)

    @override
    def make_context(self, *args: Any, **kwargs: Any) -> click.Context:
        with _in_one_sentence():
            return super().make_context(*args, **kwargs)

    @override
    def invoke(self, ctx: click.Context) -> Any:
        with _in_one_sentence(), describe_system_error():
            return super().invoke(ctx)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if args and (args[0].endswith(".py") or args[0][:2] in ("-n", "-m")):
            what = "a script" if args[0].endswith(".py") else "an option of `unisono run`"
            raise Refusal(
                f"a command must come first, but `{args[0]}` is {what}: use "
                f"`unisono run {shlex.join(args)}`."
            )
        return super().parse_args(ctx, args)


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(unisono.__version__, prog_name="unisono")
def main() -> None:
    """Train on all devices of this machine, with the same result on any number of them.

    A script that trains with unisono.Trainer runs alone with `python`, and on several workers
    with `unisono run`. The weights it ends with are the same, bit for bit.

    \b
    Examples:
      unisono demo                         train a small CNN on two workers, and on one
      unisono new train.py                 write a program to start from (--list: others)
      unisono run train.py                 one worker for each device
      unisono run -n 2 train.py --lr 0.1   two workers; --lr goes to the script
      unisono verify -n 2 ddp.py           do two ranks of any torch program equal one?
      unisono plan train.py                how fast on 1, 2, 4, … workers?
      unisono doctor                       what does this machine offer, what is wrong?
      unisono explain MismatchError        what does a message mean, what to do?
      unisono top runs/mnist               watch a run, live
      unisono where runs/mnist             which line is every rank at?
      unisono report runs/mnist            draw what happened in it
      unisono run --help                   all options of `run`
    """


_LOOKING = (doctor, explain, checkpoints, top, where, report, compare)
for _command in (demo, new, run, verify, plan, *_LOOKING):
    main.add_command(_command)
