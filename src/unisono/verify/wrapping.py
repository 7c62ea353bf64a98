"""Puts a hook around a function that a program calls."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from unisono.verify.recorder import Recorder


def wrap(owner: Any, name: str, around: Callable[..., Any], *also: Any) -> None:
    """Have `around` called in a function's place, with that function before its arguments.

    Args:
        owner: the class or module that has it.
        name: of the function.
        around: the hook.
        also: other modules that have the same function under that name.
    """
    before = getattr(owner, name)

    @functools.wraps(before)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        return around(before, *args, **kwargs)

    for place in (owner, *also):
        setattr(place, name, wrapped)


def observe(recorder: Recorder, owner: Any, name: str, see: Callable[..., None]) -> None:
    """Have `see` called before a function, with its arguments, unless Unisono trains."""

    def around(before: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if not recorder.is_exact and not torch.compiler.is_compiling():
            with recorder.guarded():
                see(*args, **kwargs)
        return before(*args, **kwargs)

    wrap(owner, name, around)
