"""What may stand behind an option? Texts become numbers, or are refused in one sentence."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import click

from unisono.cli.endings import Refusal, check_script
from unisono.launch.job import MODULE, SCRIPT, too_many_workers


def option(read: Callable[[str], Any], must: str, example: str) -> Callable[..., Any]:
    """Make the callback of an option whose text `read` refuses with a ValueError."""

    def callback(context: click.Context, param: click.Parameter, value: str | None) -> Any:
        name = param.opts[0]
        try:
            return None if value is None else read(value)
        except ValueError:
            raise Refusal(
                f"`{name}` must be {must}, but is {value!r}: use for example `{name} {example}`."
            ) from None

    return callback


def takes_script(command: Callable[..., None], *, is_optional: bool = False) -> Callable[..., None]:
    """Add ``[-m] SCRIPT ARGS…`` to a command; it gets `kind`, of a job, `script` and `args`.

    Args:
        command: what gets them.
        is_optional: whether `script` may be empty.

    Raises:
        Refusal: when it is called without a script, or with what is none.
    """

    @click.option(
        "-m", "is_module", is_flag=True, help="SCRIPT is the name of a module, as in `python -m`."
    )
    @click.argument("script", default="")
    @click.argument("args", nargs=-1, type=click.UNPROCESSED)
    @functools.wraps(command)
    def checked(is_module: bool, script: str, **options: Any) -> None:
        if not (is_module if script else is_optional):
            check_script(script)
        command(kind=MODULE if is_module else SCRIPT, script=script, **options)

    return checked


def _positive(text: str) -> int:
    if int(text) < 1:
        raise ValueError
    return int(text)


def not_negative(text: str) -> int:
    """Read a whole number of at least 0; raises ValueError."""
    if not text.isdecimal():
        raise ValueError
    return int(text)


def seconds(text: str) -> float:
    """Read a number of seconds above 0; raises ValueError."""
    if not 0 < float(text) < math.inf:
        raise ValueError
    return float(text)


count = option(_positive, "a whole number of at least 1", "2")


def num_workers(context: click.Context, param: click.Parameter, value: str | None) -> int | None:
    """Read a number of workers that a machine may be asked for."""
    number: int | None = count(context, param, value)
    if number is not None and (reason := too_many_workers(param.opts[0], number)):
        raise Refusal(reason)
    return number


timeout = click.option(
    "--timeout",
    "timeout_s",
    callback=option(seconds, "a number of seconds above 0", "600"),
    default="300",
    show_default=True,
    metavar="SECONDS",
    help="After how long a run of the program is ended.",
)
