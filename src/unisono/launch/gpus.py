"""Which GPUs do workers see? What ``--gpus`` says, or the environment, of those that are there.

Numbers are those of `nvidia-smi`. All workers see all chosen GPUs in the same order; who takes
which, says ``placement.py``. ::

    --gpus 3,0    CUDA_VISIBLE_DEVICES=3,0 in every worker     cuda:0 is GPU 3, cuda:1 is GPU 0
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

ALL, NONE = "all", "none"
VISIBLE_VARIABLE = "CUDA_VISIBLE_DEVICES"
ORDER_VARIABLE = "CUDA_DEVICE_ORDER"
_MIG = "MIG-"
_NAME = re.compile(r"(GPU|MIG)-[0-9A-Za-z/-]+")


@dataclass(frozen=True, slots=True)
class OptionNames:
    """What the user calls the options that say how many workers there are, and on which GPUs."""

    workers: str
    gpus: str
    workers_per_gpu: str
    on_cpu: str  # how to ask for workers that see no GPU
    sharing: str  # how to ask for several workers on each GPU, with a place for the number


IN_SHELL = OptionNames(
    "-n", "--gpus", "--workers-per-gpu", f"--gpus {NONE}", "--workers-per-gpu {}"
)
IN_PYTHON = OptionNames(
    "workers", "gpus", "workers_per_gpu", f'gpus="{NONE}"', "workers_per_gpu={}"
)


def choose_gpus(
    names: OptionNames, text: str, environ: Mapping[str, str], gpus: Sequence[str]
) -> tuple[str, ...]:
    """Read a list such as ``0,3`` or ``GPU-8932f937``, or ``all``.

    Args:
        names: what the options are called.
        text: what the user has passed, which beats the environment.
        environ: its ``CUDA_VISIBLE_DEVICES``, if set, says what ``all`` means.
        gpus: the unique names of those of this machine.

    Returns:
        One name per GPU, at least one.

    Raises:
        ValueError: it is no such list, names a GPU twice, or one that is not there.
    """
    option = names.gpus
    if not gpus:
        raise ValueError(
            f"`{option}` must name GPUs of this machine, but NVIDIA's driver knows of none (asked "
            f"for {text!r}): leave it out, and the workers compute on the CPU."
        )
    if text == ALL:
        text = environ.get(VISIBLE_VARIABLE, ",".join(map(str, range(len(gpus)))))
        if not text:
            raise ValueError(
                f"`{option}` must name GPUs that the job may use, but {VISIBLE_VARIABLE} is empty: "
                f"whoever set it has given the job none. Unset it, or leave `{option}` out."
            )
    chosen = tuple(_checked(option, name.strip(), text, gpus) for name in text.split(","))
    _refuse_mixed(option, chosen, text)
    places = [_place_of(name, gpus) for name in chosen]
    for name, place in zip(chosen, places, strict=True):
        if places.count(place) > 1:
            raise ValueError(
                f"`{option}` must name each GPU once, but {text!r} names {name} again: to have "
                f"several workers share each GPU, use `{names.sharing.format(2)}`."
            )
    return chosen


def visible_gpus(environ: Mapping[str, str], gpus: Sequence[str]) -> tuple[str, ...]:
    """Name the GPUs that a process with these variables sees, by CUDA's own rules.

    What stands behind a name that is not there is not seen; if one is named twice, none is.
    """
    text = environ.get(VISIBLE_VARIABLE)
    if text is None or not gpus:
        return tuple(map(str, range(len(gpus))))
    seen: dict[int | str, str] = {}
    kind = _kind_of(text.strip())
    for name in map(str.strip, text.split(",")):
        # `1st` is 1 to CUDA.
        number = re.match(r"\+?([0-9]+)", name)
        if _kind_of(name) != kind or not (kind or number) or (kind == _MIG and seen):
            break
        place = _place_of(name if number is None else number[1], gpus)
        if place is None:
            break
        if place in seen:
            return ()
        seen[place] = name
    return tuple(seen.values())


def _checked(option: str, name: str, text: str, gpus: Sequence[str]) -> str:
    if name.isdecimal() and name.isascii():
        if int(name) < len(gpus):
            return str(int(name))
        have = "only GPU 0" if len(gpus) == 1 else f"GPUs 0 to {len(gpus) - 1}"
        raise ValueError(
            f"`{option}` must name GPUs of this machine, which has {have}, but is {text!r}: "
            "`nvidia-smi -L` lists them."
        )
    if not _NAME.fullmatch(name):
        raise ValueError(
            f"`{option}` must be numbers or names of GPUs with commas between them, `{ALL}` or "
            f"`{NONE}`, but is {text!r}: use for example `0,3`; `nvidia-smi -L` lists them."
        )
    if _place_of(name, gpus) is None:
        raise ValueError(
            f"`{option}` must name GPUs of this machine, but {name} is the name, or the beginning "
            f"of the name, of none or of several: `nvidia-smi -L` lists them."
        )
    return name


def _place_of(name: str, gpus: Sequence[str]) -> int | str | None:
    """Find a GPU: by number, or by a name's beginning; itself where the driver names none."""
    if name.isdecimal():
        return int(name) if int(name) < len(gpus) else None
    if name.startswith(_MIG) or not all(gpus):
        return name
    places = [place for place, unique in enumerate(gpus) if unique.startswith(name)]
    return places[0] if len(places) == 1 else None


def _kind_of(name: str) -> str:
    """Tell names from numbers, as CUDA does by how they begin; empty for a number."""
    return name[:4] if name.startswith(("GPU-", _MIG)) else ""


def _refuse_mixed(option: str, chosen: tuple[str, ...], text: str) -> None:
    """Refuse lists of which CUDA would show processes the beginning alone."""
    kinds = set(map(_kind_of, chosen))
    if len(kinds) > 1:
        raise ValueError(
            f"`{option}` must be all numbers or all names, as CUDA reads no further than the first "
            f"kind, but is {text!r}: use for example `0,3`."
        )
    if kinds == {_MIG} and len(chosen) > 1:
        raise ValueError(
            f"`{option}` must name one MIG instance at most, as CUDA shows a process no more than "
            f"one, but names {len(chosen)}: name one, or a GPU without MIG."
        )
