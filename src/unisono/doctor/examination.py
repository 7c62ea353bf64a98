"""Makes all checks of a machine, one after the other."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import psutil

from unisono.doctor.machine_checks import judge_settings, machine_probes
from unisono.doctor.torch_checks import torch_and_gpus
from unisono.launch.nvml import gpus_of_driver
from unisono.verdicts import UNKNOWN, WARNING, WRONG, Finding


def examine(environ: Mapping[str, str]) -> list[Finding]:
    """Examine this machine.

    Args:
        environ: the variables that training would have.
    """
    gpus, interfaces = gpus_of_driver(), list(psutil.net_if_addrs())
    probes = {
        "torch": lambda: torch_and_gpus(environ, gpus),
        **machine_probes(Path("/")),
        "settings": lambda: judge_settings(environ, interfaces, [gpu.uuid for gpu in gpus]),
    }
    return list(observe(probes))


def observe(probes: Mapping[str, Callable[[], Iterable[Finding]]]) -> Iterator[Finding]:
    """Make checks, one after the other; one that fails says so."""
    for check, probe in probes.items():
        try:
            yield from list(probe())
        except Exception as error:  # whatever a strange machine has done to it
            why = f"{type(error).__name__}: {error}".rstrip(": ")
            yield Finding(check, UNKNOWN, f"This could not be read ({why}).")


def summary(findings: Sequence[Finding]) -> str:
    """Sum all up in one sentence."""
    words = {WRONG: "wrong", WARNING: "to look at", UNKNOWN: "could not be read"}
    parts = []
    for verdict, what in words.items():
        if found := [one.check for one in findings if one.verdict == verdict]:
            parts.append(f"{len(found)} {what}: {', '.join(dict.fromkeys(found))}")
    return f"{'; '.join(parts)}." if parts else "Nothing is wrong with this machine."
