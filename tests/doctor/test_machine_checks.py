"""What is said of a machine, by tables; limits of containers as Docker, systemd and Slurm do."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from unisono.tools.doctor import machine_checks as checks
from unisono.tools.doctor.machine_checks import container_cores, container_memory_left

GIB, MIB = 2**30, 2**20


def memory(total: int, available: int) -> Any:
    return SimpleNamespace(total=total, available=available)


TABLE: list[tuple[Any, tuple[Any, ...], str, str]] = [
    (checks.judge_cores, (4, 4, None), "ok", "4 cores."),
    (checks.judge_cores, (16, 4, None), "ok", "16 cores, of which this process may use 4."),
    (checks.judge_cores, (1, 1, None), "warning", "1 core. With one core"),
    (checks.judge_cores, (4, 4, 1.5), "warning", "the time of 1.5. Start at most 1 workers"),
    (checks.judge_cores, (2, 2, 2.0), "ok", "2 cores."),
    (checks.judge_memory, (memory(8 * GIB, 6 * GIB), None), "ok", "8 GiB, 6 GiB of it avail"),
    (checks.judge_memory, (memory(8 * GIB, 200 * MIB), None), "wrong", "too little for a worker"),
    (
        checks.judge_memory,
        (memory(64 * GIB, 60 * GIB), 124 * MIB),
        "wrong",
        "60 GiB of it available, 124 MiB to this container: too little",
    ),
    (checks.judge_memory, (memory(64 * GIB, 60 * GIB), 100 * GIB), "ok", "60 GiB of it available."),
    (checks.judge_shared_memory, (64 * MIB,), "warning", "(`docker run --shm-size=2g`)"),
    (checks.judge_shared_memory, (8 * GIB,), "ok", "/dev/shm has 8 GiB free."),
    (checks.judge_open_files, (-1,), "ok", "enough files open."),
    (checks.judge_open_files, (1024,), "ok", "enough files open."),
    (checks.judge_open_files, (64,), "wrong", "may have 64 files open"),
    (checks.judge_stacks, ("",), "ok", "can be read, for `unisono where`."),
    (checks.judge_stacks, ("no permission",), "warning", "(no permission), so `unisono"),
]


@pytest.mark.parametrize(("judge", "given", "verdict", "words"), TABLE)
def test_a_machine_is_judged(judge: Any, given: Any, verdict: str, words: str) -> None:
    one = judge(*given)
    assert (one.verdict, bool(one.remedy)) == (verdict, verdict != "ok")
    assert words in f"{one.evidence} {one.remedy}"


def limits_in(root: Path, files: dict[str, str]) -> tuple[int | None, float | None]:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return container_memory_left(root), container_cores(root)


V2 = {
    "proc/self/cgroup": "0::/\n",
    "sys/fs/cgroup/memory.max": f"{4 * GIB}\n",
    "sys/fs/cgroup/memory.current": f"{GIB}\n",
    "sys/fs/cgroup/cpu.max": "150000 100000\n",
}
V1 = {
    "proc/self/cgroup": "4:memory:/docker/x\n3:cpuacct,cpu:/docker/x\n2:pids:/docker/x\n",
    "sys/fs/cgroup/memory/memory.limit_in_bytes": f"{4 * GIB}\n",
    "sys/fs/cgroup/memory/memory.usage_in_bytes": f"{GIB}\n",
    "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": "150000\n",
    "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us": "100000\n",
}
OF_NO_LIMIT = {
    "proc/self/cgroup": "4:memory:/\n1:cpu:/\n",
    "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
    "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1\n",
    "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
}


@pytest.mark.parametrize("files", [V2, V1], ids=["v2", "v1"])
def test_both_versions_of_control_groups_say_the_same(
    tmp_path: Path, files: dict[str, str]
) -> None:
    assert limits_in(tmp_path, files) == (3 * GIB, 1.5)


def test_the_smallest_limit_on_the_way_up_counts(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "0::/slurm/job/step\n",
        "sys/fs/cgroup/slurm/memory.max": f"{8 * GIB}\n",
        "sys/fs/cgroup/slurm/job/memory.max": f"{2 * GIB}\n",
        "sys/fs/cgroup/slurm/job/step/memory.max": "max\n",
    }
    assert limits_in(tmp_path, files) == (2 * GIB, None)


@pytest.mark.parametrize(
    "files",
    [
        {},
        OF_NO_LIMIT,
        {"proc/self/cgroup": ""},
        {"proc/self/cgroup": "nonsense\n:::\n0::/../../etc\n"},
        {"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "max 100000\n"},
        {"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "100000 0\n"},
        {"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "\n"},
        {"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/memory.max/a": "a folder\n"},
    ],
)
def test_what_makes_no_sense_is_no_limit(tmp_path: Path, files: dict[str, str]) -> None:
    assert limits_in(tmp_path, files) == (None, None)
