"""Variables of the environment that are in the way."""

from __future__ import annotations

import pytest

from unisono.tools.doctor.machine_checks import judge_settings

GPUS = ("GPU-aaaa", "GPU-bbbb")
FINE = "No variable of the environment is in the way."


def judged(environ: dict[str, str], gpus: tuple[str, ...] = ()) -> list[tuple[str, str]]:
    found = judge_settings(environ, ["lo", "eth0"], gpus)
    return [(one.verdict, f"{one.evidence} {one.remedy}".strip()) for one in found]


@pytest.mark.parametrize(
    ("name", "value", "verdict", "words"),
    [
        ("UNISONO_FAULTS", "kill:rank=1", "wrong", "has workers fail on purpose. Unset it "),
        ("CUDA_LAUNCH_BLOCKING", "1", "warning", "the host waits for every kernel"),
        ("TORCH_DISTRIBUTED_DEBUG", "DETAIL", "warning", "makes training slow"),
        ("NVIDIA_TF32_OVERRIDE", "0", "warning", "changes the bits of results"),
        ("MKL_CBWR", "AVX2", "warning", "changes the bits of results"),
        ("ATEN_CPU_CAPABILITY", "default", "warning", "changes the bits of results"),
        ("OMP_PROC_BIND", "close", "warning", "to the same cores"),
        ("MALLOC_PERTURB_", "165", "warning", "all memory is written twice"),
        ("NCCL_P2P_DISABLE", "1", "warning", "GPUs do not copy to each other"),
        ("NCCL_SOCKET_IFNAME", "ib0", "wrong", "names no interface of this machine (lo, eth0)"),
        ("GLOO_SOCKET_IFNAME", "ens3", "wrong", "so ranks cannot meet"),
        ("RANK", "1", "wrong", "`RANK` and `WORLD_SIZE` must be set together"),
        ("LD_SOMETHING", "1", "ok", FINE),
        ("TORCH_DISTRIBUTED_DEBUG", "OFF", "ok", FINE),
        ("CUDA_LAUNCH_BLOCKING", "0", "ok", FINE),
        ("OMP_PROC_BIND", "false", "ok", FINE),
        ("NCCL_SOCKET_IFNAME", "eth", "ok", FINE),
        ("NCCL_SOCKET_IFNAME", "=lo", "ok", FINE),
        ("NCCL_SOCKET_IFNAME", "^docker", "ok", FINE),
        ("CUDA_VISIBLE_DEVICES", "7", "ok", FINE),
    ],
)
def test_one_variable_is_judged(name: str, value: str, verdict: str, words: str) -> None:
    ((found, text),) = judged({name: value})
    assert (found, words in text) == (verdict, True), text


@pytest.mark.parametrize(
    ("value", "verdict", "words"),
    [
        ("0,1", "ok", FINE),
        ("1", "warning", "shows 1 of 2 GPUs. Unset it to see all"),
        ("", "warning", "shows 0 of 2 GPUs."),
        ("0,5", "wrong", "shows 1 of 2 GPUs, fewer than it names."),
        ("-1", "wrong", "shows 0 of 2 GPUs, fewer than it names."),
        ("GPU-bb", "warning", "shows 1 of 2 GPUs."),
    ],
)
def test_visible_gpus_are_judged(value: str, verdict: str, words: str) -> None:
    ((found, text),) = judged({"CUDA_VISIBLE_DEVICES": value}, GPUS)
    assert (found, words in text) == (verdict, True), text


def test_variables_of_a_job_that_is_not_there_are_told() -> None:
    ((verdict, text),) = judged({"RANK": "1", "WORLD_SIZE": "4"})
    assert verdict == "warning"
    assert "this is rank 1 of 4, so a program that is started here waits for the others" in text


def test_a_hostile_value_is_shown_harmlessly() -> None:
    ((_, text),) = judged({"MKL_CBWR": "\x1b[2J" + "a" * 500})
    assert "\x1b" not in text
    assert len(text) < 300
