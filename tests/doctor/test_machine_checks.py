"""What is said of a machine, by tables."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

from unisono.doctor import machine_checks as checks
from unisono.doctor.container_limits import ContainerLimits
from unisono.doctor.diagnoses import Diagnosis

GIB, MIB = 2**30, 2**20
NOTHING = ContainerLimits()
NOW_S = 1.8e9


def told(diagnoses: Iterable[Diagnosis] | Diagnosis) -> list[tuple[str, str]]:
    if isinstance(diagnoses, Diagnosis):
        diagnoses = [diagnoses]
    return [(one.verdict, f"{one.evidence} {one.remedy}".strip()) for one in diagnoses]


TABLE: list[tuple[Any, tuple[Any, ...], list[tuple[str, str]]]] = [
    (checks.judge_cores, (4, [0, 1, 2, 3], NOTHING, ""), [("ok", "4 cores.")]),
    (
        checks.judge_cores,
        (16, [0, 1, 2, 5], NOTHING, "performance"),
        [("ok", "16 cores, of which this process may use 4 (0–2, 5).")],
    ),
    (checks.judge_cores, (1, [0], NOTHING, ""), [("warning", "1 core. With one core")]),
    (
        checks.judge_cores,
        (4, [0, 1, 2, 3], ContainerLimits(num_cores=1.5, num_throttled=1234), ""),
        [("warning", "gets the time of 1.5, and has been stopped 1,234 times for it. Start at m")],
    ),
    (checks.judge_cores, (2, [0, 1], ContainerLimits(num_cores=2.0), ""), [("ok", "2 cores.")]),
    (
        checks.judge_cores,
        (2, [0, 1], NOTHING, "powersave"),
        [("ok", "2 cores."), ("warning", "to save power")],
    ),
    (checks.judge_load, (0.2, 2), [("ok", "Load of the last minute: 0.2.")]),
    (checks.judge_load, (3.0, 2), [("warning", "3.0 processes have been computing on 2 cores")]),
    (checks.judge_memory, (8 * GIB, 6 * GIB, NOTHING), [("ok", "8 GiB, 6 GiB of it avail")]),
    (checks.judge_memory, (8 * GIB, 200 * MIB, NOTHING), [("wrong", "too little for a worker")]),
    (
        checks.judge_memory,
        (64 * GIB, 60 * GIB, ContainerLimits(GIB, 900 * MIB)),
        [("wrong", "this container may use 1 GiB and uses 900 MiB: too little")],
    ),
    (
        checks.judge_memory,
        (64 * GIB, 60 * GIB, ContainerLimits(128 * GIB)),
        [("ok", "64 GiB, 60 GiB of it available.")],
    ),
    (checks.judge_shared_memory, (None, 0, "/dev/shm"), [("warning", "There is no /dev/shm, wh")]),
    (checks.judge_shared_memory, (64 * MIB, 64 * MIB, "s"), [("warning", "(`docker run --shm-")]),
    (checks.judge_shared_memory, (8 * GIB, 10 * MIB, "s"), [("wrong", "it is full. Unisono's")]),
    (checks.judge_shared_memory, (8 * GIB, 8 * GIB, "s"), [("ok", "s has 8 GiB, 8 GiB of")]),
    (checks.judge_processes, (NOTHING, None), [("ok", "No limit of processes.")]),
    (checks.judge_processes, (NOTHING, 4096), [("ok", "Room for 4,096 more processes and thr")]),
    (
        checks.judge_processes,
        (ContainerLimits(num_processes=100, num_processes_now=90), 4096),
        [("wrong", "Room for 10 more processes and threads; a worker takes a dozen. Raise")],
    ),
    (checks.judge_open_files, (None, None), [("ok", "No limit of open files.")]),
    (checks.judge_open_files, (1024, 4096), [("ok", "A process may have 1,024 files open.")]),
    (checks.judge_open_files, (256, 4096), [("warning", "`ulimit -n 4096` before the program")]),
    (checks.judge_open_files, (64, None), [("wrong", "may have 64 files open")]),
    (checks.judge_locked_memory, (8 * MIB, []), [("ok", "may lock 8 MiB; nothing here needs")]),
    (checks.judge_locked_memory, (None, ["mlx5_0"]), [("ok", "No limit of locked memory.")]),
    (checks.judge_locked_memory, (8 * MIB, ["mlx5_0"]), [("warning", "InfiniBand (mlx5_0) nee")]),
    (checks.judge_clock, ("tsc", NOW_S, 0.0, True), [("ok", "is `tsc`, synchronized.")]),
    (checks.judge_clock, ("", NOW_S, None, None), [("ok", "The clocks run.")]),
    (checks.judge_clock, ("hpet", NOW_S, 0.0, None), [("warning", "from `hpet`, which takes mic")]),
    (checks.judge_clock, ("tsc", NOW_S, -1.5, None), [("warning", "jumped by -1.50 s while")]),
    (checks.judge_clock, ("tsc", 0.0, 0.0, None), [("wrong", "The clock of the day is before")]),
    (checks.judge_network, (["lo", "eth0"], True, True), [("ok", "Interfaces lo, eth0; 127.0.")]),
    (checks.judge_network, ([], False, True), [("wrong", "No network interface; nothing can be")]),
    (checks.judge_network, (["lo"], True, False), [("warning", "this host's own name has no")]),
    (checks.judge_network, (["lo"], True, None), [("warning", "was not resolved within 2 s, so")]),
    (checks.judge_looking, ("", "0"), [("ok", "can be read, for `unisono where`.")]),
    (checks.judge_looking, ("", "1"), [("ok", "of jobs of other launchers only root can.")]),
    (checks.judge_looking, ("no permission", "3"), [("warning", "(no permission), so `unisono")]),
    (checks.judge_temporary, ("/tmp", GIB, True), [("ok", "/tmp has 1 GiB free.")]),
    (checks.judge_temporary, ("/tmp", GIB, False), [("wrong", "/tmp takes no files. Make room")]),
    (checks.judge_temporary, ("/tmp", MIB, True), [("wrong", "/tmp has 1 MiB free. Make room")]),
    (checks.judge_memfd, ("",), [("ok", "Workers can share memory (memfd).")]),
    (checks.judge_memfd, ("Operation not permitted",), [("wrong", "(Operation not permitted)")]),
]


@pytest.mark.parametrize(("judge", "given", "expected"), TABLE)
def test_a_machine_is_judged(judge: Any, given: Any, expected: list[tuple[str, str]]) -> None:
    found = told(judge(*given))
    assert [verdict for verdict, _ in found] == [verdict for verdict, _ in expected], found
    for (_, text), (_, words) in zip(found, expected, strict=True):
        assert words in text


def test_every_verdict_that_is_not_fine_says_what_to_do() -> None:
    for judge, given, _ in TABLE:
        seen = judge(*given)
        for one in [seen] if isinstance(seen, Diagnosis) else seen:
            assert bool(one.remedy) == (one.verdict != "ok"), one


def test_unknown_memory_is_no_verdict() -> None:
    with pytest.raises(LookupError):
        list(checks.judge_memory(0, 0, NOTHING))


def test_ranges() -> None:
    assert [checks.ranges(numbers) for numbers in ([], [3], [0, 1, 3, 4, 5])] == [
        "",
        "3",
        "0–1, 3–5",
    ]
