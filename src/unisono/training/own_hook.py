"""Hooks of ours on a program's modules, which copies of the modules do without.

A program may copy or save its model at any time (`copy.deepcopy`, `torch.save`), and hooks are
copied with it; what ours lead to can be neither copied nor saved.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, final


@final
class OwnHook:
    """A hook; a copy of it does nothing, in processes without Unisono as well."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function

    def __call__(self, *given: Any) -> Any:
        """Call the function."""
        return self._function(*given)

    def __reduce__(self) -> tuple[Any, ...]:
        """Be copied, and pickled, as a function of Python that takes anything and returns None."""
        return getattr, (nullcontext(), "__exit__")
