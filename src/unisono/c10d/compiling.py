"""How does ``torch.compile`` leave the backend alone?

torch calls a group from C++, also in the midst of a compiled model (DDP, when it makes its buckets
anew). Python's frames are then still watched by the compiler, which would compile the backend's own
methods, and fails at what it cannot look into. Marked code is run as it is, with all that it calls.
"""

from __future__ import annotations

from types import FunctionType
from typing import TypeVar

from torch._C._dynamo.eval_frame import (
    _FrameAction,
    _FrameExecStrategy,
    set_code_exec_strategy,
)

_Class = TypeVar("_Class", bound=type)


def never_compiled(cls: _Class) -> _Class:
    """Mark all methods of a class. (``torch.compiler.disable`` would load the compiler: 1 s.)"""
    as_it_is = _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.SKIP)
    for method in vars(cls).values():
        if isinstance(method, FunctionType):
            set_code_exec_strategy(method.__code__, as_it_is)
    return cls
