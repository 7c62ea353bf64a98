"""The commands for beginners: `demo` and `new`, both on one program."""

from __future__ import annotations

import contextlib
import shlex
import subprocess
import sys
from pathlib import Path

import click

from unisono.cli.endings import Refusal, leave, saying

PROGRAM = Path(__file__).with_name("starting_program.py")

_NEXT = """
What to try next:
  unisono new train.py             write this program to a file, to change it into your own
  python train.py                  one worker, the same digest
  unisono run -n 2 train.py        two workers
  UNISONO_FAULTS="kill:rank=1,step=30" unisono run -n 2 train.py
                                   a worker is killed and replaced, the same digest
  unisono verify your_ddp.py       does a DDP program compute what one process would?
  unisono doctor                   what does this machine offer?"""


@click.command(short_help="Train a small CNN on two workers, in half a minute.")
def demo() -> None:
    """Train a small CNN on handwritten digits with two workers on the CPU, in half a minute.

    Nothing is downloaded, and no file is written. `unisono new train.py` writes the program.

    \b
    Example:
      unisono demo                         two workers, the same digest as on one
    """
    command = [sys.executable, "-m", "unisono", "run", "--gpus", "none", "-n", "2", str(PROGRAM)]
    # Ctrl-C reaches the command as well, which then ends its workers.
    with subprocess.Popen(command) as run, contextlib.suppress(KeyboardInterrupt):
        run.wait()
    with saying():
        if run.returncode == 0:
            click.echo(_NEXT)
    leave(run.returncode if run.returncode >= 0 else 128 - run.returncode)


@click.command(short_help="Write a starting program.")
@click.argument("file", type=Path)
def new(file: Path) -> None:
    """Write a commented program to FILE. It runs as it is; replace model, loss and data.

    \b
    Example:
      unisono new train.py
    """
    if file.suffix != ".py":
        raise Refusal(f"FILE must end in .py, but is {str(file)!r}: use {str(file) + '.py'!r}.")
    name = shlex.quote(str(file))
    text = PROGRAM.read_text(encoding="utf-8").replace("train.py", name.replace("\\", r"\\"))
    try:
        with file.open("x", encoding="utf-8") as written:
            written.write(text)
    except FileExistsError:
        raise Refusal(
            f"FILE must be new, but {str(file)!r} exists: choose another name, or remove it."
        ) from None
    except OSError as error:
        raise Refusal(
            f"FILE must be a place to write to, but {str(file)!r} is not: {error.strerror}."
        ) from None
    with saying():
        click.echo(f"{file} is written. Run it with `python {name}` or `unisono run -n 2 {name}`.")
