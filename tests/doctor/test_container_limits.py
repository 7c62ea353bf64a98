"""Limits of control groups, as Docker, Kubernetes, systemd and Slurm set them."""

from __future__ import annotations

from pathlib import Path

import pytest

from unisono.doctor.container_limits import (
    ContainerLimits,
    container_limits,
    parse_count,
    parse_cpu_max,
    parse_limit,
)
from unisono.procfs import parse_groups

GIB = 2**30
NO_LIMIT_OF_V1 = "9223372036854771712\n"


def tree(root: Path, files: dict[str, str]) -> ContainerLimits:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return container_limits(root)


V2 = {
    "proc/self/cgroup": "0::/\n",
    "sys/fs/cgroup/memory.max": f"{4 * GIB}\n",
    "sys/fs/cgroup/memory.current": f"{GIB}\n",
    "sys/fs/cgroup/cpu.max": "150000 100000\n",
    "sys/fs/cgroup/cpu.stat": "usage_usec 5\nnr_periods 9\nnr_throttled 17\n",
    "sys/fs/cgroup/pids.max": "100\n",
    "sys/fs/cgroup/pids.current": "42\n",
}
V1 = {
    "proc/self/cgroup": "4:memory:/docker/x\n3:cpuacct,cpu:/docker/x\n2:pids:/docker/x\n",
    "sys/fs/cgroup/memory/memory.limit_in_bytes": f"{4 * GIB}\n",
    "sys/fs/cgroup/memory/memory.usage_in_bytes": f"{GIB}\n",
    "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": "150000\n",
    "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us": "100000\n",
    "sys/fs/cgroup/cpu,cpuacct/cpu.stat": "nr_throttled 17\n",
    "sys/fs/cgroup/pids/pids.max": "100\n",
    "sys/fs/cgroup/pids/pids.current": "42\n",
}


@pytest.mark.parametrize("files", [V2, V1], ids=["v2", "v1"])
def test_both_versions_say_the_same(tmp_path: Path, files: dict[str, str]) -> None:
    assert tree(tmp_path, files) == ContainerLimits(4 * GIB, GIB, 1.5, 17, 100, 42)


def test_the_smallest_limit_on_the_way_up_counts(tmp_path: Path) -> None:
    limits = tree(
        tmp_path,
        {
            "proc/self/cgroup": "0::/slurm/job/step\n",
            "sys/fs/cgroup/slurm/memory.max": f"{8 * GIB}\n",
            "sys/fs/cgroup/slurm/job/memory.max": f"{2 * GIB}\n",
            "sys/fs/cgroup/slurm/job/step/memory.max": "max\n",
        },
    )
    assert limits == ContainerLimits(memory_bytes=2 * GIB)


def test_no_limit_of_v1_is_a_large_number(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "4:memory:/\n1:cpu:/\n",
        "sys/fs/cgroup/memory/memory.limit_in_bytes": NO_LIMIT_OF_V1,
        "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1\n",
        "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
    }
    assert tree(tmp_path, files) == ContainerLimits()


@pytest.mark.parametrize(
    "files",
    [
        {},
        {"proc/self/cgroup": ""},
        {"proc/self/cgroup": "nonsense\n:::\n0::/../../etc\n"},
        {"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "100000 0\n"},
        {"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "\n"},
        {"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/memory.max/a": "a folder\n"},
    ],
)
def test_what_makes_no_sense_is_no_limit(tmp_path: Path, files: dict[str, str]) -> None:
    assert tree(tmp_path, files) == ContainerLimits()


def test_parts() -> None:
    assert parse_groups("3:cpu,cpuacct:/a:b\n0::/\n") == {"cpu": "/a:b", "cpuacct": "/a:b", "": "/"}
    assert [parse_limit(text) for text in ("12\n", "max", "", "-1")] == [12, None, None, None]
    assert [parse_cpu_max(text) for text in ("50000 100000", "max 100000", "1")] == [
        0.5,
        None,
        None,
    ]
    assert [parse_count(text, "a") for text in ("a 3", "aa 3", "a b", "")] == [3, 0, 0, 0]
