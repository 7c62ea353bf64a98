"""Which variables workers see."""

from __future__ import annotations

import dataclasses

from unisono.runtime.launch.job import SCRIPT, Job, launch_environment, worker_environment

JOB = Job(
    kind=SCRIPT,
    target="x.py",
    environ={},
    num_workers=3,
    threads=2,
    restarts=0,
    replaces=True,
    stall_timeout_s=60.0,
    backend="gloo",
    master_port=4321,
)


def seen(rank: int = 1, job: Job = JOB, **environ: str) -> dict[str, str]:
    return worker_environment(dataclasses.replace(job, environ=environ), rank, {"LINK": "9"})


def test_a_worker_knows_its_place_and_where_to_meet() -> None:
    expected = {
        "RANK": "1",
        "WORLD_SIZE": "3",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "3",
        "GROUP_RANK": "0",
        "GROUP_WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "4321",
        "GLOO_SOCKET_IFNAME": "lo",
        "TP_SOCKET_IFNAME": "lo",
        "NCCL_SOCKET_IFNAME": "=lo",
        "OMP_NUM_THREADS": "2",
        "LINK": "9",
    }
    assert expected.items() <= seen().items()


def test_what_the_user_says_of_interfaces_counts() -> None:
    assert seen(GLOO_SOCKET_IFNAME="eth0")["GLOO_SOCKET_IFNAME"] == "eth0"


def test_what_another_launcher_said_does_not_count() -> None:
    names = ("RANK", "MASTER_PORT", "MASTER_ADDR", "GROUP_RANK")
    variables = seen(**dict.fromkeys(names, "9"), TORCHELASTIC_RUN_ID="9", ROLE_RANK="9", HOME="/h")
    assert [variables[name] for name in names] == ["1", "4321", "127.0.0.1", "0"]
    assert not {"TORCHELASTIC_RUN_ID", "ROLE_RANK"} & variables.keys()
    assert variables["HOME"] == "/h"


def test_workers_are_told_what_the_user_has_called() -> None:
    command = ["unisono", "run", "a file.py"]
    assert launch_environment({"A": "b", "UNISONO_COMMAND": "an outer one"}, command) == {
        "A": "b",
        "UNISONO_COMMAND": "unisono run 'a file.py'",
    }
