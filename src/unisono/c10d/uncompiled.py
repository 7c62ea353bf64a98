"""Keeps our methods out of ``torch.compile``, by a mark on their code.

While a compiled program runs, torch may compile every Python function that is about to run. C++
(for example DDP's broadcast of buffers) calls our Python inside of such programs, and what moves
bytes between processes must not be traced. torch's own decorator would load its compiler, a second
of import, in every program; the mark that it sets does not.
"""

from __future__ import annotations

from types import FunctionType
from typing import Any, TypeVar

import torch

_Class = TypeVar("_Class", bound=type)


def never_compiled(cls: _Class) -> _Class:
    """Mark a class's methods, and whatever they call, as not to be compiled."""
    marks: Any = torch._C._dynamo.eval_frame
    skip = marks._FrameExecStrategy(marks._FrameAction.SKIP, marks._FrameAction.SKIP)
    for method in vars(cls).values():
        while isinstance(method, FunctionType):
            marks.set_code_exec_strategy(method.__code__, skip)
            method = getattr(method, "__wrapped__", None)
    return cls
