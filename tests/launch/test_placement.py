"""How many workers there are, on which GPUs, and what their environment says of it."""

from __future__ import annotations

from typing import Any

import pytest

from unisono.runtime.launch.placement import Machine, Placement, place_workers

CPUS = Machine(num_cores=8)
ONE = Machine(8, ("GPU-aa",))
FOUR = Machine(8, ("GPU-aa", "GPU-bb", "GPU-cc", "GPU-dd"))

FIXED = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}


def each(workers: int) -> dict[str, str]:
    return {**FIXED, "UNISONO_WORKERS_PER_GPU": str(workers)}


def place(
    machine: Machine,
    environ: dict[str, str],
    *,
    workers: int | None = None,
    workers_per_gpu: int | None = None,
) -> tuple[int, dict[str, str]]:
    placement = place_workers(workers, workers_per_gpu, environ, machine)
    return placement.num_workers, dict(placement.variables)


@pytest.mark.parametrize("environ", [{}, {"CUDA_VISIBLE_DEVICES": "0,1"}, {"A": "b"}])
def test_without_gpus_there_is_a_worker_for_each_core_and_nothing_is_said(
    environ: dict[str, str],
) -> None:
    for workers, expected in ((None, 8), (3, 3), (30, 30)):
        assert place_workers(workers, None, environ, CPUS) == Placement(expected)


@pytest.mark.parametrize(
    ("machine", "environ", "asked", "expected"),
    [
        (ONE, {}, {}, (1, each(1))),
        (FOUR, {}, {}, (4, each(1))),
        (FOUR, {}, {"workers": 1}, (1, each(1))),
        (FOUR, {}, {"workers": 4}, (4, each(1))),
        (FOUR, {}, {"workers_per_gpu": 2}, (8, each(2))),
        (FOUR, {}, {"workers_per_gpu": 2, "workers": 3}, (3, each(2))),
        (ONE, {}, {"workers_per_gpu": 3, "workers": 3}, (3, each(3))),
        # What the user has set counts.
        (FOUR, {"CUDA_VISIBLE_DEVICES": "2,1"}, {}, (2, each(1))),
        (FOUR, {"CUDA_VISIBLE_DEVICES": "2,9"}, {}, (1, each(1))),
        (FOUR, {"UNISONO_WORKERS_PER_GPU": "2"}, {}, (8, FIXED)),
        (FOUR, {"UNISONO_WORKERS_PER_GPU": "2"}, {"workers_per_gpu": 1}, (4, each(1))),
        (ONE, {"CUBLAS_WORKSPACE_CONFIG": ":0:0"}, {}, (1, {"UNISONO_WORKERS_PER_GPU": "1"})),
        # GPUs that the environment hides.
        (FOUR, {"CUDA_VISIBLE_DEVICES": ""}, {}, (8, {})),
        (FOUR, {"CUDA_VISIBLE_DEVICES": "-1"}, {"workers": 9}, (9, {})),
        # No more than a number of its own for whoever shares GPUs elsewhere.
        (CPUS, {"UNISONO_WORKERS_PER_GPU": "2"}, {}, (8, {})),
    ],
)
def test_workers_and_their_variables(
    machine: Machine,
    environ: dict[str, str],
    asked: dict[str, Any],
    expected: tuple[int, dict[str, str]],
) -> None:
    assert place(machine, environ, **asked) == expected


@pytest.mark.parametrize(
    ("machine", "environ", "asked", "words"),
    [
        (
            ONE,
            {},
            {"workers": 4},
            "there must be at most 1 worker here, 1 for each GPU (0), but 4 are asked for: start "
            "fewer, share GPUs with `UNISONO_WORKERS_PER_GPU=4` in the environment, or compute on "
            "the CPU with `CUDA_VISIBLE_DEVICES=` there.",
        ),
        (FOUR, {}, {"workers": 9}, "share GPUs with `UNISONO_WORKERS_PER_GPU=3` in"),
        (FOUR, {"CUDA_VISIBLE_DEVICES": "3"}, {"workers": 2}, "1 for each GPU (3), but"),
        (
            FOUR,
            {},
            {"workers": 9, "workers_per_gpu": 2},
            "at most 8 workers here, 2 for each GPU (0,1,2,3), but 9 are",
        ),
        (
            FOUR,
            {},
            {"workers_per_gpu": 1000},
            "at most 1,024 workers, but 4,000 are",
        ),
        (CPUS, {}, {"workers": 1025}, "at most 1,024 workers, but 1,025 are asked for"),
        (FOUR, {"UNISONO_WORKERS_PER_GPU": "two"}, {}, "`UNISONO_WORKERS_PER_GPU` must be a whole"),
        (
            FOUR,
            {"UNISONO_WORKERS_PER_GPU": "0"},
            {},
            "`UNISONO_WORKERS_PER_GPU` must be at least",
        ),
        (
            CPUS,
            {},
            {"workers_per_gpu": 2},
            "`--workers-per-gpu` or `workers_per_gpu` must be left out where workers get no GPU, "
            "but is 2, and of the 0 GPUs that NVIDIA's driver knows, CUDA_VISIBLE_DEVICES shows "
            "none: leave it out, and the workers compute on the CPU.",
        ),
        (FOUR, {"CUDA_VISIBLE_DEVICES": ""}, {"workers_per_gpu": 2}, "of the 4 GPUs that NVIDIA"),
    ],
)
def test_what_does_not_fit_is_refused_with_the_way_out(
    machine: Machine, environ: dict[str, str], asked: dict[str, Any], words: str
) -> None:
    with pytest.raises(ValueError) as raised:
        place(machine, environ, **asked)
    assert words in str(raised.value)
