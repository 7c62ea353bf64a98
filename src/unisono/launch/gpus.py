"""Which GPUs do workers see? What ``--gpus`` says, checked against what the driver knows.

The launcher asks NVIDIA's management library, which neither loads torch nor begins to use CUDA: a
process that has used CUDA must not fork. Numbers are those of `nvidia-smi`.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable, Mapping

ALL = "all"
VISIBLE_VARIABLE = "CUDA_VISIBLE_DEVICES"
_ORDER_VARIABLE = "CUDA_DEVICE_ORDER"
_NAME = re.compile(r"(GPU|MIG)-[0-9A-Za-z/-]+")


def choose_gpus(
    option: str, text: str | None, environ: Mapping[str, str], num_gpus: Callable[[], int]
) -> tuple[str, ...]:
    """Read a list such as ``0,3`` or ``GPU-8932f937``, or ``all``.

    Args:
        option: the name of the option, such as ``--gpus``.
        text: what the user has passed, which beats the environment; None for nothing.
        environ: its ``CUDA_VISIBLE_DEVICES``, if set, says what ``all`` means.
        num_gpus: counts the GPUs of this machine.

    Returns:
        One name per GPU; none if the user has chosen none.

    Raises:
        ValueError: it is no such list, names a GPU twice, or one that is not there.
    """
    if text is None:
        return ()
    if not isinstance(text, str):
        raise ValueError(
            f"`{option}` must be a text such as `0,3` or `all`, but is {text!r}: put it in quotes."
        )
    num = num_gpus()
    if num < 1:
        raise ValueError(
            f"`{option}` must name GPUs of this machine, but NVIDIA's driver knows of none (asked "
            f"for {text!r}): leave it out, and the workers compute on the CPU."
        )
    if text == ALL:
        text = environ.get(VISIBLE_VARIABLE, ",".join(map(str, range(num))))
        if not text:
            raise ValueError(
                f"`{option}` must name GPUs that the job may use, but {VISIBLE_VARIABLE} is empty: "
                f"whoever set it has given the job none. Unset it, or leave `{option}` out."
            )
    names = tuple(_checked(option, name.strip(), text, num) for name in text.split(","))
    twice = {name for name in names if names.count(name) > 1}
    if twice:
        raise ValueError(
            f"`{option}` must name each GPU once, but {text!r} names {min(twice)} again: "
            "workers do not share a GPU; start fewer of them."
        )
    return names


def _checked(option: str, name: str, text: str, num_gpus: int) -> str:
    if name.isdecimal() and name.isascii():
        if int(name) < num_gpus:
            return str(int(name))
        have = "only GPU 0" if num_gpus == 1 else f"GPUs 0 to {num_gpus - 1}"
        raise ValueError(
            f"`{option}` must name GPUs of this machine, which has {have}, but is {text!r}: "
            "`nvidia-smi -L` lists them."
        )
    if _NAME.fullmatch(name):
        return name
    raise ValueError(
        f"`{option}` must be numbers or names of GPUs with commas between them, or `all`, but is "
        f"{text!r}: use for example `0,3`; `nvidia-smi -L` lists them."
    )


def check_workers(option: str, gpus: tuple[str, ...], num_workers: int) -> None:
    """Refuse more workers than GPUs, if GPUs are named.

    Raises:
        ValueError: there are fewer GPUs than workers.
    """
    if gpus and num_workers > len(gpus):
        raise ValueError(
            f"`{option}` must name a GPU for each worker, but names {len(gpus)} "
            f"({','.join(gpus)}) for {num_workers} workers: start at most {len(gpus)}."
        )


def with_gpus(environ: Mapping[str, str], gpus: tuple[str, ...]) -> dict[str, str]:
    """Return the variables of a process that sees these GPUs, in this order, and no others."""
    order = {_ORDER_VARIABLE: "PCI_BUS_ID", **environ}
    return {**order, VISIBLE_VARIABLE: ",".join(gpus)}


def num_gpus_here() -> int:
    """Count the GPUs of this machine; 0 without NVIDIA's driver. Source: NVML API reference.

    All of them, while ``ddp.device.num_gpus`` counts those that one process may use.
    """
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return 0
    if nvml.nvmlInit_v2() != 0:
        return 0
    count = ctypes.c_uint(0)
    failed = nvml.nvmlDeviceGetCount_v2(ctypes.byref(count))
    nvml.nvmlShutdown()
    return 0 if failed else count.value
