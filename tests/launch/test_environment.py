"""Which variables workers see, and which GPUs."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from unisono.launch.environment import launch_environment, worker_environment
from unisono.launch.gpus import check_workers, choose_gpus, with_gpus
from unisono.launch.job import SCRIPT, Job

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


def test_without_a_network_there_is_no_port() -> None:
    job = dataclasses.replace(JOB, master_port=None)
    assert "MASTER_PORT" not in seen(job=job, MASTER_PORT="9")


def test_checks_are_turned_on_where_the_user_has_not_said_how() -> None:
    command = ["unisono", "run", "a file.py"]
    assert launch_environment({"A": "b", "UNISONO_COMMAND": "an outer one"}, command) == {
        "A": "b",
        "UNISONO_COMMAND": "unisono run 'a file.py'",
    }
    variables = launch_environment({"TORCH_SHOW_CPP_STACKTRACES": "0"}, [], debug=True)
    assert variables["TORCH_DISTRIBUTED_DEBUG"] == "DETAIL"
    assert variables["PYTHONFAULTHANDLER"] == "1"
    assert variables["TORCH_SHOW_CPP_STACKTRACES"] == "0"


def test_gpus_are_numbered_as_nvidia_smi_does_unless_the_user_has_said_how() -> None:
    assert with_gpus({"A": "b", "CUDA_VISIBLE_DEVICES": "9"}, ("0", "3")) == {
        "A": "b",
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        "CUDA_VISIBLE_DEVICES": "0,3",
    }
    assert with_gpus({"CUDA_DEVICE_ORDER": "x"}, ("0",))["CUDA_DEVICE_ORDER"] == "x"
    assert launch_environment({}, [], ("GPU-1f",))["CUDA_VISIBLE_DEVICES"] == "GPU-1f"


@pytest.mark.parametrize(
    ("text", "environ", "gpus"),
    [
        (None, {}, ()),
        ("0,3", {}, ("0", "3")),
        (" 3, 0 ", {}, ("3", "0")),
        ("03", {}, ("3",)),
        ("0,3", {"CUDA_VISIBLE_DEVICES": "1"}, ("0", "3")),
        ("GPU-8932f937-d72c,MIG-GPU-89/3/0", {}, ("GPU-8932f937-d72c", "MIG-GPU-89/3/0")),
        ("all", {}, ("0", "1", "2", "3")),
        ("all", {"CUDA_VISIBLE_DEVICES": "2,1"}, ("2", "1")),
    ],
)
def test_gpus_are_read(text: str | None, environ: dict[str, str], gpus: tuple[str, ...]) -> None:
    assert choose_gpus("--gpus", text, environ, lambda: 4) == gpus


@pytest.mark.parametrize(
    ("text", "num_gpus", "words"),
    [
        ("0", 0, "`--gpus` must name GPUs of this machine, but NVIDIA's driver knows of none"),
        ("all", 0, "NVIDIA's driver knows of none"),
        ("0,4", 4, "which has GPUs 0 to 3, but is '0,4'"),
        ("1", 1, "which has only GPU 0, but is '1'"),
        ("0,0", 4, "must name each GPU once, but '0,0' names 0 again"),
        ("", 4, "must be numbers or names of GPUs with commas between them"),
        ("0,", 4, "must be numbers or names of GPUs with commas between them"),
        ("-1", 4, "must be numbers or names"),
        ("0 3", 4, "must be numbers or names"),
        ("cuda:0", 4, "must be numbers or names"),
        ("none", 4, "must be numbers or names"),
    ],
)
def test_what_names_no_gpus_of_this_machine_is_refused(
    text: str, num_gpus: int, words: str
) -> None:
    with pytest.raises(ValueError) as raised:
        choose_gpus("--gpus", text, {}, lambda: num_gpus)
    assert words in str(raised.value)


def test_gpus_that_are_hidden_from_the_job_stay_hidden() -> None:
    with pytest.raises(ValueError, match="CUDA_VISIBLE_DEVICES is empty"):
        choose_gpus("--gpus", "all", {"CUDA_VISIBLE_DEVICES": ""}, lambda: 4)


@pytest.mark.parametrize("given", [0, [0, 1]])
def test_gpus_that_are_no_text_are_refused(given: Any) -> None:
    with pytest.raises(ValueError, match="must be a text such as"):
        choose_gpus("gpus", given, {}, lambda: 4)


def test_each_worker_has_a_gpu_of_its_own() -> None:
    check_workers("--gpus", (), 9)
    check_workers("--gpus", ("0", "3"), 1)
    with pytest.raises(ValueError, match=r"names 2 \(0,3\) for 3 workers: start at most 2"):
        check_workers("--gpus", ("0", "3"), 3)
