"""What can go wrong in the world, as one tree.

Mistakes of the caller are ``ValueError`` and ``TypeError``; what the world does to a run is::

    UnisonoError
    ├── WorkerError            a worker raised, was killed, or left at the wrong time
    ├── PeerLostError          this worker waits for one that has left or failed
    ├── WaitTimeoutError       this worker waited too long for one that is still there
    ├── MismatchError          the workers do not run the same program
    ├── RendezvousError        the ranks of a process group could not come to share a memory
    ├── NonFiniteLossError     a loss, or the norm of the gradients, is NaN or infinite
    ├── NondeterministicError  an operation has no deterministic form (also a RuntimeError)
    ├── OutOfMemoryError       a pass or an update needs more memory (also a MemoryError)
    ├── LoadingError           a sample cannot be read, or a loader process has died
    ├── CallbackError          a callback raised something
    ├── CheckpointError        a checkpoint is not whole, or is another run's
    ├── NotPlainFileError      a run's file is a link, a pipe or the like (also an OSError)
    └── DataFormatError        a file is not what its name says (also a ValueError)

Every message says what must hold, what was seen, and what to do.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import KW_ONLY, InitVar, dataclass, field
from typing import Any


class UnisonoError(Exception):
    """Base class of Unisono's errors. Mistakes in a call are ValueError and TypeError."""

    def __init__(self, *args: object) -> None:
        super().__init__(*args)
        # Tracebacks show notes below the message; `str(error)` stays the message.
        described = next(each for each in type(self).__mro__ if each.__module__ == __name__)
        self.add_note(f"Causes and remedies: `unisono explain {described.__name__}`")

    def __post_init__(self, message: str) -> None:
        """Begin as any error does, once a class that has fields has set them."""
        UnisonoError.__init__(self, message)

    def __reduce__(self) -> tuple[Any, ...]:
        """Travel to other processes with all fields, as Ray and pools of processes send errors."""
        names = type(self).__init__.__code__.co_varnames
        fields = {name: value for name, value in self.__dict__.items() if name in names}
        return functools.partial(type(self), *self.args, **fields), (), self.__dict__


@dataclass(eq=False, repr=False)
class WorkerError(UnisonoError):
    """A worker raised an exception, was killed by a signal, or left at the wrong time.

    Attributes:
        rank: which worker, or None when no single one is to blame.
        exit_code: its exit status; negative for a signal, as in :mod:`subprocess`.
        remote_traceback: what Python printed in the worker; empty when it died without a word.
    """

    message: InitVar[str]
    _: KW_ONLY
    rank: int | None = None
    exit_code: int | None = None
    remote_traceback: str = ""


class PeerLostError(UnisonoError):
    """This worker waited for another one that has finished or failed and will never arrive.

    Attributes:
        rank: the worker that left.
    """

    def __init__(self, message: str, *, rank: int) -> None:
        super().__init__(message)
        self.rank = rank


class WaitTimeoutError(UnisonoError):
    """Another worker did not arrive in time where all workers meet.

    Attributes:
        missing: the ranks that did not arrive.
        waited_s: how long this worker waited, in seconds.
    """

    def __init__(self, message: str, *, missing: tuple[int, ...], waited_s: float) -> None:
        super().__init__(message)
        self.missing = missing
        self.waited_s = waited_s


class MismatchError(UnisonoError):
    """The workers do not run the same program on the same data."""


class RendezvousError(UnisonoError):
    """The ranks of a job or of a process group could not find each other."""


@dataclass(eq=False, repr=False)
class NonFiniteLossError(UnisonoError):
    """A loss, or the norm of the gradients, is NaN or infinite; nothing has been updated.

    Attributes:
        step: the step, counted from 0 over the whole run.
        shard: the shard whose forward pass gave the loss; None for the norm.
        value: the loss, or the norm.
        module: the name of the first module of the model whose output, or gradient, is not finite,
            ``""`` for the model itself; None where no module's is, or it is not known.
        file, line: the program's line that calls it; ``""`` and 0 where it is not known.
        parameters: the names of those whose values, or gradients, are not finite, as far as known.
    """

    message: InitVar[str]
    _: KW_ONLY
    step: int
    shard: int | None
    value: float
    module: str | None = None
    file: str = ""
    line: int = 0
    parameters: tuple[str, ...] = ()


@dataclass(eq=False, repr=False)
class NondeterministicError(UnisonoError, RuntimeError):
    """An operation of the model has no deterministic form on this device; nothing was updated.

    Attributes:
        operation: torch's name of it, such as ``"put_"``.
        module: the name of the innermost module of the model that calls it, ``""`` for the model
            itself; None where no module does, or it is not known.
        file, line: the innermost line of the program's own code that calls it; ``""`` and 0 where
            it is not known.
    """

    message: InitVar[str]
    _: KW_ONLY
    operation: str = ""
    module: str | None = None
    file: str = ""
    line: int = 0


@dataclass(eq=False, repr=False)
class OutOfMemoryError(UnisonoError, MemoryError):
    """A pass or an update needs more memory than its device has.

    Its cause is torch's own error.

    Attributes:
        rank: the worker that ran out of it; None where it is not known.
        device: its device, as torch calls it.
        step: the step, counted from 0 over the whole run; None outside of training.
        shard: the shard; None where it was not in a pass over one.
        phase: what it was in, in words, such as ``"forward pass"``.
        needed: bytes by what they are for, such as ``"parameters"``.
    """

    message: InitVar[str]
    _: KW_ONLY
    rank: int | None = None
    device: str = ""
    step: int | None = None
    shard: int | None = None
    phase: str = ""
    needed: Mapping[str, int] = field(default_factory=dict)


class LoadingError(UnisonoError):
    """A sample cannot be read, or a loader process has died.

    Attributes:
        indices: the samples that were to be read, by their place in the dataset; one where it is
            known which, none where a process has died.
    """

    def __init__(self, message: str, *, indices: tuple[int, ...] = ()) -> None:
        super().__init__(message)
        self.indices = indices


class CallbackError(UnisonoError):
    """A callback raised an exception, which is the cause of this error."""


class CheckpointError(UnisonoError):
    """A checkpoint is not whole, not of its format, or belongs to another run."""


class NotPlainFileError(UnisonoError, OSError):
    """Under the name of a run's file there is a link, a directory, a pipe, a device or a socket."""


class DataFormatError(UnisonoError, ValueError):
    """A data file is truncated, or not of the format it should have."""
