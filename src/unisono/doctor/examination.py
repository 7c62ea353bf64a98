"""Makes all checks of a machine, one after the other."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

from unisono.doctor.child_process import ChildFailedError, answer_of
from unisono.doctor.diagnoses import UNREAD, WRONG, Diagnosis, Probe, observe
from unisono.doctor.gpu_links import gpus_and_links
from unisono.doctor.machine_probes import machine_probes
from unisono.doctor.measured_checks import judge_measured
from unisono.doctor.settings_checks import judge_settings
from unisono.doctor.torch_checks import judge_gpus, judge_links, judge_torch
from unisono.launch.nvml import gpus_of_driver

_TORCH_S = 90.0  # from a cold disk
_MEASURING_S = 120.0
# What says that a process is one of several, or changes what workers do.
_OF_JOBS = ("UNISONO_", "OMPI_", "PMI", "SLURM_", "TORCHELASTIC_", "MASTER_", "LOCAL_", "GROUP_")


def examine(
    environ: Mapping[str, str], *, measures: bool, root: Path = Path("/")
) -> Iterator[Diagnosis]:
    """Examine this machine; each diagnosis as it is made.

    Args:
        environ: the variables that training would have.
        measures: whether to start two workers and time them, too.
        root: of /proc, /sys and /dev, for tests.
    """

    @cache
    def torch_facts() -> dict[str, Any]:
        return answer_of("unisono.doctor.torch_probe", _TORCH_S, environ)

    def torch() -> Iterator[Diagnosis]:
        try:
            yield judge_torch(torch_facts(), len(gpus_of_driver()))
        except ChildFailedError as error:
            remedy = 'Run `python -c "import torch"`, and install torch anew.'
            yield Diagnosis("torch", WRONG, f"torch cannot be loaded: {error}.", remedy)

    def gpus() -> Iterator[Diagnosis]:
        known, links = gpus_and_links()
        facts: dict[str, Any] = {}
        with suppress(ChildFailedError):  # told before
            facts = torch_facts()
        yield from judge_gpus(facts, known)
        yield from judge_links(links)

    def settings() -> Iterator[Diagnosis]:
        interfaces = [name for _, name in socket.if_nameindex()]
        num_cores = len(os.sched_getaffinity(0))
        yield from judge_settings(environ, num_cores, interfaces, gpus_of_driver())

    def measured() -> Iterator[Diagnosis]:
        try:
            found = answer_of("unisono.doctor.measuring_job", _MEASURING_S, of_nobody(environ))
        except ChildFailedError as error:
            said = f"Two workers could not be timed: {error}."
            yield Diagnosis("measurement", UNREAD, said)
            return
        yield from judge_measured(found, len(os.sched_getaffinity(0)))

    probes: dict[str, Probe] = {"torch": torch, "gpus": gpus, **machine_probes(root)}
    probes["settings"] = settings
    if measures:
        probes["measurement"] = measured
    yield from observe(probes)


def of_nobody(environ: Mapping[str, str]) -> dict[str, str]:
    """Leave out what a launcher has set for one of several processes."""
    return {
        name: value
        for name, value in environ.items()
        if not name.startswith(_OF_JOBS) and name not in ("RANK", "WORLD_SIZE")
    }
