"""What may stand behind an option? Texts become numbers, or are refused in one sentence."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import click

from unisono.cli.endings import Refusal, check_script
from unisono.launch.job import MODULE, SCRIPT


class Text(click.ParamType):  # type: ignore[type-arg]  # of which older ones take none
    """What an option takes: a text that is read, or refused in one sentence. Final.

    Args:
        name: of what stands there, for ``--help``, in small letters.
        read: makes something of the text, or raises a ValueError.
        must: what the text must be, in words.
        example: of such a text.
    """

    def __init__(self, name: str, read: Callable[[str], Any], must: str, example: str) -> None:
        self.name, self._read, self._must, self._example = name, read, must, example

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """See click's; raises :class:`Refusal`."""
        option = param.opts[0] if param is not None else self.name
        try:
            return self._read(value)
        except ValueError:
            raise Refusal(
                f"`{option}` must be {self._must}, but is {value!r}: use for example "
                f"`{option} {self._example}`."
            ) from None


def takes_script(command: Callable[..., None]) -> Callable[..., None]:
    """Add ``[-m] SCRIPT ARGS…`` to a command; it gets `kind`, of a job, `script` and `args`.

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
        if not (is_module and script):
            check_script(script)
        command(kind=MODULE if is_module else SCRIPT, script=script, **options)

    return checked


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


_AT_LEAST_1 = "a whole number of at least 1"
COUNT = Text("n", _positive, _AT_LEAST_1, "2")
WORKERS = Text("workers", _positive, _AT_LEAST_1, "2")
NOT_NEGATIVE = Text("n", _not_negative, "a whole number of at least 0", "1")


def seconds(example: str) -> Text:
    """Make what takes a number of seconds above 0."""
    return Text("seconds", _seconds, "a number of seconds above 0", example)
