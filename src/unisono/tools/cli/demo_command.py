"""`unisono demo`: the same training on two workers and on one, and whether the digests are equal.

Invariant: nothing is left behind, however it ends: neither processes nor files.
"""

from __future__ import annotations

import os
import runpy
import shutil
import tempfile
import time

import click

from unisono.runtime.launch.api import launch
from unisono.runtime.launch.gpus import VISIBLE_VARIABLE
from unisono.runtime.notices import say
from unisono.tools.cli.endings import Refusal
from unisono.tools.cli.new_command import FIRST, RECIPES

_NEXT = [
    ("unisono new train.py", "write this program to a file, to change it into your own"),
    ("python train.py", "one worker, the same digest"),
    ("unisono run -n 2 train.py", "two workers"),
    (
        'UNISONO_FAULTS="kill:rank=1,step=30" unisono run -n 2 train.py',
        "a worker is killed and replaced, the same digest",
    ),
    ("unisono verify your_ddp.py", "does a DDP program compute what one process would?"),
    ("unisono doctor", "what does this machine offer?"),
]
_LONG_S = 40.0  # far longer than on a machine that is free


@click.command(short_help="Train a small CNN on two workers and on one, in half a minute.")
def demo() -> None:
    """Train a small CNN on handwritten digits on the CPU: with two workers, then with one.

    Both end with the same digest, so with the same weights, bit for bit. Nothing is downloaded, and
    no file stays. `unisono new train.py` writes the program.

    \b
    Example:
      unisono demo                         on two workers and on one, with one digest
    """
    began = time.monotonic()
    try:
        with tempfile.TemporaryDirectory(prefix="unisono-demo-") as folder:
            # Optimizers have torch make a folder of this name, which would stay.
            os.environ |= {VISIBLE_VARIABLE: "", "TORCHINDUCTOR_CACHE_DIR": folder}
            together = _trained("Two workers train a small CNN on handwritten digits:", 2)
            alone = _trained("One worker does the same:", 1)
    except KeyboardInterrupt:
        raise click.exceptions.Exit(130) from None
    except OSError as error:
        raise Refusal(
            f"torch must be able to write temporary files, but: {error.strerror}. Make room, or "
            "set TMPDIR to a folder that can be written."
        ) from None
    _say_whether_equal(together[:16], alone[:16])
    _say_what_is_next(time.monotonic() - began)


def _trained(title: str, num_workers: int) -> str:
    """Run the program on workers and return the digest that it ends with."""
    click.secho(title, bold=True)
    try:
        digest: str = launch(_train, workers=num_workers)[0]
    except Exception as error:
        say(str(error.__cause__ or error))
        raise click.exceptions.Exit(1) from None
    click.echo()
    return digest


def _train() -> str:
    digest: str = runpy.run_path(str(RECIPES / f"{FIRST}.py"))["main"]()
    return digest


def _say_whether_equal(together: str, alone: str) -> None:
    if together != alone:
        say(
            f"the digests of two workers and of one must be equal, but are {together} and {alone}: "
            "please report it, with what `unisono doctor` says."
        )
        raise click.exceptions.Exit(1)
    text = f"Two workers and one computed the same weights, bit for bit: digest {alone}."
    click.secho(click.wrap_text(text, _width()), fg="green", bold=True)


def _say_what_is_next(took_s: float) -> None:
    width = _width()
    if took_s > _LONG_S:
        text = (
            f"It took {took_s:.0f} s, with a load of {os.getloadavg()[0]:.0f} on {os.cpu_count()} "
            "cores. The weights do not depend on that."
        )
        click.echo(click.wrap_text(text, width))
    table = click.HelpFormatter(width=width)
    with table.section("\nWhat to try next"):
        table.write_dl(_NEXT, col_max=30 if width >= 80 else 4)
    click.echo(table.getvalue().rstrip())


def _width() -> int:
    return min(shutil.get_terminal_size().columns, 100)
