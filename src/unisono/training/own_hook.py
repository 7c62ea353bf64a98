"""Unisono's hooks on a program's modules, which copies of the modules lack.

A program may copy or save its model at any time (`copy.deepcopy`, `torch.save`), and hooks are
copied with it; what Unisono's hooks refer to can be neither copied nor saved.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, final


@final
class OwnHook:
    """A hook whose copies do nothing, even in processes without Unisono."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function

    def __call__(self, *given: Any) -> Any:
        """Call the function."""
        return self._function(*given)

    def __reduce__(self) -> tuple[Any, ...]:
        """Return a copy, also pickled, that takes any arguments and returns None."""
        return getattr, (nullcontext(), "__exit__")
