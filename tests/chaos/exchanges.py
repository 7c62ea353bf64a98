"""Every exchange that a run may have, by name, and where it computes then: bits must not differ."""

from __future__ import annotations

import functools
from typing import Any

EXCHANGES = {
    "shared": ("cpu", "shared"),  # one copy of the parameters
    "staged": ("cpu", "staged"),  # replicas, parts through shared memory
    "gloo": ("cpu", "gloo"),  # replicas, parts through gloo
    "zero": ("cpu", "zero"),  # each worker with its pieces of the state alone
    "sim": ("sim", "staged"),  # on the test accelerator
    "sim-zero": ("sim", "zero"),
}
ACCELERATED = "sim"


def device_of(name: str) -> str:
    """Give the device of workers that use an exchange."""
    return EXCHANGES[name][0]


def variables_of(name: str) -> dict[str, str]:
    """Give the variables that choose an exchange."""
    return {"UNISONO_EXCHANGE": EXCHANGES[name][1]}


@functools.cache
def has_accelerator() -> bool:
    """Tell whether there is a test accelerator on this machine; compiles it where nobody has."""
    from tests.accelerator import sim

    return sim.why_not() is None


def skip_without(name: str) -> None:
    """Skip a test whose workers cannot use an exchange here."""
    import pytest

    if device_of(name) == ACCELERATED and not has_accelerator():
        pytest.skip("there is no test accelerator here: tests/accelerator says why")


def use(monkeypatch: Any, name: str) -> None:
    """Have the workers of a test use an exchange; skip the test where they cannot."""
    skip_without(name)
    for variable, value in variables_of(name).items():
        monkeypatch.setenv(variable, value)


def install(device: str) -> None:
    """Make the test accelerator known to this process, if it is to compute there."""
    if device.startswith("sim"):
        from tests.accelerator import sim

        sim.install()
