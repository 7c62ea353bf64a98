"""The fixture of tests on the test accelerator.

A test that asks for ``accelerator`` runs in a process of its own, where it is installed: other
tests do not meet a device that they did not ask for. It is skipped where there is none.
"""

from __future__ import annotations

import importlib
from types import ModuleType

import pytest
from tests.accelerator import sim
from tests.accelerator.forked import in_a_fork

__all__ = ["accelerator", "build", "optimizers_are_imported", "pytest_pyfunc_call"]


@pytest.fixture
def accelerator() -> ModuleType:
    """Give the functions that control the accelerator, installed where the test runs."""
    if reason := sim.why_not():
        pytest.skip(reason)
    return sim


@pytest.fixture(scope="session")
def optimizers_are_imported() -> None:
    """Once for all forked processes, each of which would import it at its first step."""
    importlib.import_module("torch._dynamo")


def build(session: pytest.Session) -> None:
    """Compile before the first test, whose time is limited, and load once for all of them."""
    if session.config.option.collectonly:
        return
    if any("accelerator" in getattr(item, "fixturenames", ()) for item in session.items):
        sim.load()


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Call the test in a forked process."""
    if "accelerator" not in pyfuncitem.fixturenames:
        return None
    names = pyfuncitem._fixtureinfo.argnames
    arguments = {name: pyfuncitem.funcargs[name] for name in names}

    def test() -> None:
        sim.install()
        pyfuncitem.obj(**arguments)

    in_a_fork(test)
    return True
