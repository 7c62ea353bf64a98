"""What do workers compute on? Told once to the user of a machine with GPUs, as workers tell it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from unisono.launch.job import Job
from unisono.workers.launcher_messages import ComputesOn


@dataclass(eq=False)
class Devices:
    """Waits until every worker has told its device. Final."""

    _job: Job  # says how many GPUs workers see; without one nothing is said
    _say: Callable[[str], None]  # shows the user one line
    _told: dict[int, ComputesOn] = field(default_factory=dict)

    def hear(self, rank: int, device: ComputesOn) -> None:
        """Take what a worker tells; its replacement, and its next run, tell the same."""
        if rank in self._told or not self._job.num_gpus:
            return
        self._told[rank] = device
        if len(self._told) == self._job.num_workers:
            told = [self._told[rank] for rank in sorted(self._told)]
            self._say(devices_line(told, self._job.on_cpu))


def devices_line(devices: Sequence[ComputesOn], on_cpu: str = "") -> str:
    """Say in one line what workers compute on.

    Args:
        devices: of each rank.
        on_cpu: what to add if none has a GPU.
    """
    models = {device.gpu for device in devices}
    if len(models) > 1:
        each = (f"worker {rank} on {_named(device)}" for rank, device in enumerate(devices))
        return f"{_workers(devices)}: {', '.join(each)}."
    line = f"{_workers(devices)} on {_range(devices)}"
    if devices[0].is_on_cpu:
        return f"{line}: {on_cpu}." if on_cpu else f"{line}."
    sharing = Counter(device.device for device in devices)
    most, least = max(sharing.values()), min(sharing.values())
    if len(sharing) > 1 and most > 1:
        line += f", {'' if most == least else 'up to '}{most} on each"
    return f"{line}."


def _workers(devices: Sequence[ComputesOn]) -> str:
    return "1 worker computes" if len(devices) == 1 else f"{len(devices)} workers compute"


def _range(devices: Sequence[ComputesOn]) -> str:
    """Name devices of one model: the first and the last of many."""
    names = list(dict.fromkeys(device.device for device in devices))
    if len(names) == 1:
        return _named(devices[0])
    between = " and " if len(names) == 2 else " to "
    return f"{names[0]}{between}{names[-1]}" + _model(devices[0])


def _named(device: ComputesOn) -> str:
    return "the CPU" if device.is_on_cpu else device.device + _model(device)


def _model(device: ComputesOn) -> str:
    return f" ({device.gpu})" if device.gpu else ""
