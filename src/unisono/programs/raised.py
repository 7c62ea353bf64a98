"""By which exception does the program leave its loop, if by any?

A generator that is closed is not told. But the exception, which nothing of the program refers to
yet, has a traceback, and that has the frames through which it passes.
"""

from __future__ import annotations

import dis
import functools
import gc
import types
from collections.abc import Iterator, Sequence
from typing import TypeGuard

from unisono.errors import UnisonoError

_DROPPING = "POP_TOP"  # `break` and `return` drop a loop's iterator
_RAISING_AGAIN = {"RAISE_VARARGS", "RERAISE"}  # without another traceback
_UNKNOWN = (
    "the program must leave its loop by the same exception again, but several were under way, so "
    "it is not known by which one: leave the loop by `break`, and raise the exception after it"
)


def raised_in(frames: Sequence[types.FrameType]) -> BaseException | None:
    """Return the exception that passes through one of the frames; None if none does.

    Returns a UnisonoError if it cannot be told from others. The frames run code that leaves a loop.
    """
    instructions = {_instruction(frame.f_code, frame.f_lasti) for frame in frames}
    if _DROPPING in instructions:
        return None  # what is within that frame is closed; the rest is slow
    through = [one for one in gc.get_referrers(*frames) if type(one) is types.TracebackType]
    passing = [one for one in through if one.tb_lasti == one.tb_frame.f_lasti]
    if not passing and not instructions.isdisjoint(_RAISING_AGAIN):
        passing = through
    if not passing:
        return None
    known = {id(one) for each in passing for one in _chain(each)}
    there = [one for one in gc.get_objects() if _may_be(one)]
    found = [one for one in there if any(id(each) in known for each in _chain(one.__traceback__))]
    if not found:  # before Python 3.12 it has its traceback once it is caught
        found = [one for one in there if one.__traceback__ is None and _is_of_nobody(one, there)]
    return found[0] if len(found) == 1 else UnisonoError(_UNKNOWN)


def _may_be(value: object) -> TypeGuard[BaseException]:
    return isinstance(value, BaseException) and not isinstance(value, GeneratorExit)


def _is_of_nobody(error: BaseException, there: list[BaseException]) -> bool:
    """Return whether nothing but a list refers to an exception that is under way."""
    return all(one is there or isinstance(one, types.FrameType) for one in gc.get_referrers(error))


def _chain(one: types.TracebackType | None) -> Iterator[types.TracebackType]:
    while one is not None:
        yield one
        one = one.tb_next


@functools.lru_cache(maxsize=256)
def _instruction(code: types.CodeType, lasti: int) -> str:
    at = {each.offset: each.opname for each in dis.get_instructions(code)}
    return at.get(lasti, "")
