"""How fast are two workers here? What each of them does.

::

    meetings    all come to a barrier                                    seconds each
    memory      copies of 64 MiB, by one worker alone and by both        bytes a second each
    passes      a forward and backward pass, alone and at the same time  seconds each
    sums        steps of a model that is nothing but parameters          seconds beside the passes
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from unisono.workers.context import context

if TYPE_CHECKING:
    from unisono.workers.team import Team

WORKERS = 2
NUM_PARAMETERS = (100_000, 8_000_000)
_FOR_S = 0.7
_COPY_BYTES = 64 * 2**20
_NUM_STEPS = 14
_WARM_UP = 4


def measure() -> dict[str, Any]:
    """Measure on this worker. Collective: both workers call it."""
    import torch

    team = context().join().team
    source = torch.ones(_COPY_BYTES // 4)
    target = torch.empty_like(source)
    model = torch.nn.Sequential(
        *(layer for _ in range(4) for layer in (torch.nn.Linear(512, 512), torch.nn.ReLU()))
    )
    batch = torch.randn(64, 512)
    return {
        "meeting_s": _median_s(lambda: team.meet("doctor")),
        "copy_s": _alone_and_together(team, lambda: target.copy_(source)),
        "copy_bytes": 2 * _COPY_BYTES,  # read and written
        "pass_s": _alone_and_together(team, lambda: model(batch).sum().backward()),
        "sum_s": {str(count): _sum_s(count) for count in NUM_PARAMETERS},
    }


def _median_s(act: Callable[[], object], num_times: int = 2000) -> float:
    """Time what all workers do equally often."""
    times = []
    for _ in range(num_times):
        begun_s = time.perf_counter()
        act()
        times.append(time.perf_counter() - begun_s)
    return statistics.median(times[num_times // 10 :])


def _alone_and_together(team: Team, act: Callable[[], object]) -> list[float]:
    """Time something on rank 0 while the other waits, and on both at the same time."""
    act()
    team.meet("doctor: alone")
    alone_s = _repeated_s(act) if team.world.rank == 0 else 0.0
    team.meet("doctor: together")
    together_s = _repeated_s(act)
    team.meet("doctor: done")
    return [alone_s, together_s]


def _repeated_s(act: Callable[[], object]) -> float:
    times: list[float] = []
    until_s = time.perf_counter() + _FOR_S
    while time.perf_counter() < until_s or len(times) < 3:
        begun_s = time.perf_counter()
        act()
        times.append(time.perf_counter() - begun_s)
    return statistics.median(times)


def _sum_s(num_parameters: int) -> float:
    """Time what a step does beside its passes: meetings, sums, the update."""
    import torch

    import unisono

    model = torch.nn.ParameterList([torch.nn.Parameter(torch.ones(num_parameters))])
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    run = unisono.Run(model, optimizer, shards=WORKERS, device="cpu")
    data = torch.utils.data.TensorDataset(torch.ones(WORKERS * _NUM_STEPS, 1))
    times = []
    for step in run.steps(data, batch_size=WORKERS, epochs=1):
        with step:
            for (scale,) in step.shards:
                step.backward((model[0] * scale.mean()).sum())
        told = run.team.times(run.world.rank, step.number)
        if told is not None:
            times.append(sum(told[4:]))  # waiting, summing, updating
    return statistics.median(times[_WARM_UP:])
