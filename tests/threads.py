"""Do something in several threads at once."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any


def in_threads(num_threads: int, work: Callable[[int], Any]) -> list[Any]:
    """Run ``work(number)`` in a thread each; give what each has returned or raised."""

    def one(number: int) -> Any:
        try:
            return work(number)
        except Exception as error:
            return error

    with ThreadPoolExecutor(num_threads) as pool:
        return list(pool.map(one, range(num_threads)))
