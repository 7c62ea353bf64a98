"""Hosts for tests; without root or the tools all of them are skipped, and say why."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest
from tests.hosts.virtual_hosts import Host, Link, virtual_hosts, why_not

MakeHosts = Callable[..., list[Host]]


@pytest.fixture
def make_hosts() -> Iterator[MakeHosts]:
    """Give a function that makes so many hosts; they end with the test."""
    if reason := why_not():
        pytest.skip(reason)
    with ExitStack() as stack:

        def make(number: int, link: Link | None = None) -> list[Host]:
            return stack.enter_context(virtual_hosts(number, link))

        yield make
