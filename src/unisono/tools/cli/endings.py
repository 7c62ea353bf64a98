"""How does a command end, and what do its options accept? Errors are one sentence."""

from __future__ import annotations

import contextlib
import errno
import math
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial, wraps
from typing import Any, NoReturn, final

import click
from typing_extensions import override

from unisono.errors import UnisonoError
from unisono.runtime.launch.job import MODULE, SCRIPT
from unisono.runtime.timeouts import MOST_S
from unisono.runtime.world import THREADS_AT_MOST


class Refusal(click.ClickException):
    """Wrong input, reported in one sentence."""

    exit_code = 2

    def show(self, file: Any = None) -> None:
        """Print the sentence."""
        click.echo(f"unisono: {self.message}", file=file or sys.stderr)


class NotInTime(Refusal):
    """What another host had to do in time was not done; the command is right."""

    exit_code = 1


@contextlib.contextmanager
def refusing() -> Iterator[None]:
    """Report refusals within a block in one sentence."""
    try:
        yield
    except (ValueError, UnisonoError) as error:
        raise Refusal(str(error)) from None


_REMEDIES = {
    errno.EACCES: "ask its owner, or copy it to a folder of yours",
    errno.ENOSPC: "make room there",
    errno.EFBIG: "raise `ulimit -f`, in a new shell if need be",
    errno.EMFILE: "raise `ulimit -n`, in a new shell if need be",
}


@contextlib.contextmanager
def describe_system_error() -> Iterator[None]:
    """Report in one sentence what the system refuses: a file, memory, a process."""
    try:
        yield
    except OSError as error:
        if error.errno not in _REMEDIES:
            raise
        what = error.filename or "a file or an output of this command"
        raise Refusal(
            f"{what} must be accessible, but the system says {error.strerror!r}: "
            f"{_REMEDIES[error.errno]}."
        ) from None


@contextlib.contextmanager
def answering() -> Iterator[None]:
    """Exit with status 2 after an unexpected error in a command whose status 1 is an answer."""
    try:
        with describe_system_error():
            yield
    except (click.ClickException, click.exceptions.Exit):
        raise
    except Exception:
        traceback.print_exc()
        raise click.exceptions.Exit(2) from None


@contextlib.contextmanager
def copying_folder() -> Iterator[None]:
    """Report in one sentence that there is no room for a copy of the working folder."""
    try:
        yield
    except OSError as error:
        raise Refusal(
            f"a folder for temporary files must take a copy of the working folder, but "
            f"{error.filename or 'it'!r} does not ({error.strerror}): make room, or set TMPDIR."
        ) from None


def _check_script(script: str) -> None:
    if not script:
        command = f"unisono {click.get_current_context().info_name}"
        raise Refusal(
            f"SCRIPT must be a Python file, but none is named: use for example "
            f"`{command} train.py`, and see `{command} --help`."
        )
    trouble = "does not exist here" if not os.path.exists(script) else "is no plain file"
    if os.path.isfile(script) or os.path.isfile(os.path.join(script, "__main__.py")):
        trouble = "" if os.access(script, os.R_OK) else "may not be read by you"
    if trouble:
        raise Refusal(
            f"SCRIPT must be a Python file, but {script!r} {trouble}: check its name, or use `-m` "
            "with the name of a module."
        )


def leave(status: int) -> NoReturn:
    """Exit at once: everything is written, and nothing needs cleaning up."""
    for stream in (sys.stdout, sys.stderr):
        # The reader of a script's output may be gone; the status still counts.
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(status)


@final
class Text(click.ParamType):  # type: ignore[type-arg]  # older versions take none
    """The type of an option: `read` converts its text, or raises ValueError.

    ``--help`` shows `name`; `must` says what the text must be, and `example` is one.
    """

    def __init__(self, name: str, read: Callable[[str], Any], must: str, example: str) -> None:
        self.name, self._read, self._must, self._example = name, read, must, example

    @override
    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        option = param.opts[0] if param is not None else self.name
        try:
            return self._read(value)
        except ValueError:
            raise Refusal(
                f"`{option}` must be {self._must}, but is {value!r}: use for example "
                f"`{option} {self._example}`."
            ) from None


def takes_script(command: Callable[..., None]) -> Callable[..., None]:
    """Add ``[-m] SCRIPT ARGS…`` to a command, which gets the job's `kind`, `script` and `args`."""

    @click.option(
        "-m", "is_module", is_flag=True, help="SCRIPT is the name of a module, as in `python -m`."
    )
    @click.argument("script", default="")
    @click.argument("args", nargs=-1, type=click.UNPROCESSED)
    @wraps(command)
    def checked(is_module: bool, script: str, **options: Any) -> None:
        try:
            os.getcwd()  # the program's folder, without which torch cannot be loaded
        except FileNotFoundError:
            raise Refusal(
                "a program must be started in a folder that exists, but the current one has been "
                "removed: enter another one."
            ) from None
        if not (is_module and script):
            _check_script(script)
        command(kind=MODULE if is_module else SCRIPT, script=script, **options)

    return checked


def _at_least(least: int, text: str, most: float = math.inf) -> int:
    if not least <= int(text) <= most:
        raise ValueError
    return int(text)


def _seconds(text: str) -> float:
    if not 0 < float(text) <= MOST_S:
        raise ValueError
    return float(text)


@dataclass(frozen=True, slots=True)
class NumHosts:
    """How many hosts compute together, as given by ``--nnodes``: ``2`` or ``1:2``."""

    least: int
    most: int

    @staticmethod
    def read(text: str) -> NumHosts:
        """Parse the text, or raise ValueError."""
        least, _, most = text.partition(":")
        read = NumHosts(int(least), int(most or least))
        if not 0 < read.least <= read.most:
            raise ValueError
        return read

    def __str__(self) -> str:
        return f"{self.least}" if self.least == self.most else f"{self.least}:{self.most}"


COUNT = Text("n", partial(_at_least, 1), "a whole number of at least 1", "2")
_THREADS = partial(_at_least, 1, most=THREADS_AT_MOST)
THREADS = Text("n", _THREADS, f"a whole number of at least 1, at most {THREADS_AT_MOST}", "2")
NUM_HOSTS = Text("n", NumHosts.read, "a number of hosts, or the least and the most", "1:2")
NOT_NEGATIVE = Text("n", partial(_at_least, 0), "a whole number of at least 0", "1")


@dataclass(frozen=True, slots=True)
class SeveralHosts:
    """Which of several hosts this is."""

    nnodes: NumHosts  # the number of hosts
    node_rank: int  # the number of this one
    rendezvous: str  # host 0's ``host:port``, or a store's ``host:port/name``
    job: str = ""  # the cluster's name of the job, whose port may be that of another job

    @property
    def place(self) -> tuple[str, str]:
        """The host and port of the rendezvous."""
        host, _, port = self.rendezvous.partition("/")[0].rpartition(":")
        return host.strip("[]"), port

    @property
    def name(self) -> str:
        """The run's name in a store that no launcher starts; empty if host 0 has the rendezvous."""
        return self.rendezvous.partition("/")[2]

    @property
    def run(self) -> str:
        """The run's name among all that may use the rendezvous."""
        return self.name or self.job

    @property
    def has_rendezvous(self) -> bool:
        """Whether the rendezvous is on this host."""
        return self.node_rank == 0 and not self.name


def seconds(example: str) -> Text:
    """Return the type of an option that takes a number of seconds above 0."""
    must = f"a number of seconds above 0, at most {MOST_S:,.0f}"
    return Text("seconds", _seconds, must, example)
