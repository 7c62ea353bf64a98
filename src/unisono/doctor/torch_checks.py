"""Is this torch one that trains here, and are there GPUs for it? Pure verdicts."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from unisono.doctor.diagnoses import FINE, WARNING, WRONG, Diagnosis
from unisono.doctor.gpu_links import DriverGpu
from unisono.quantities import size

_OLDEST = (2, 11)


def judge_torch(facts: Mapping[str, Any], num_gpus: int) -> Diagnosis:
    """Judge a torch.

    Args:
        facts: what ``torch_probe.py`` has printed.
        num_gpus: how many the driver knows.
    """
    version = str(facts["version"])
    built = f"CUDA {facts['cuda']}" if facts.get("cuda") else "CPUs alone"
    if facts.get("hip"):
        built = f"ROCm {facts['hip']}"
    capability = str(facts.get("capability", ""))
    said = f"torch {version}, built for {built}; it computes with {capability} instructions"
    verdict, remedy = WRONG, ""
    if version_of(version) < _OLDEST:
        said += ", and is too old"
        remedy = "Install torch 2.11 or newer: `pip install --upgrade torch`."
    elif not facts.get("distributed"):
        said += ", and is without torch.distributed"
        remedy = "Install torch's own wheel; Unisono's backend and DDP need torch.distributed."
    elif num_gpus and built == "CPUs alone":
        said += f", and cannot use this machine's {_gpus(num_gpus)}"
        remedy = "Install a torch for CUDA, or compute on the CPU with `unisono run --gpus none`."
    elif capability in ("DEFAULT", "NO AVX"):
        verdict = WARNING
        said += ": the processor has no vector instructions that torch uses"
        remedy = "Unset ATEN_CPU_CAPABILITY; in a virtual machine, pass the host's processor on."
    else:
        verdict = FINE
    return Diagnosis("torch", verdict, f"{said}.", remedy, facts)


def version_of(text: str) -> tuple[int, ...]:
    """Read ``2.13.0+cpu`` as (2, 13)."""
    found = re.match(r"(\d+)\.(\d+)", text)
    return tuple(map(int, found.groups())) if found else (0, 0)


def judge_gpus(facts: Mapping[str, Any], known: Sequence[DriverGpu]) -> Iterator[Diagnosis]:
    """Judge the GPUs: what the driver knows, and what torch says of them.

    Args:
        facts: what ``torch_probe.py`` has printed; empty: nothing.
        known: those of the driver.
    """
    if not known:
        if facts.get("gpus"):
            yield from _of_torch_alone(facts["gpus"])
        else:
            said = "No GPU: NVIDIA's driver knows of none here. Workers compute on the CPU."
            yield Diagnosis("gpus", FINE, said)
        return
    names = ", ".join(f"{at}: {gpu.name} with {size(gpu.memory)}" for at, gpu in enumerate(known))
    told = {"gpus": [gpu._asdict() for gpu in known]}
    said = f"{_gpus(len(known))} ({names})"
    if trouble := facts.get("gpu_trouble"):
        remedy = "Look with `nvidia-smi`; the driver must be new enough for torch's CUDA."
        yield Diagnosis("gpus", WRONG, f"{said}, but torch says: {trouble}", remedy, told)
        return
    yield Diagnosis("gpus", FINE, f"{said}.", facts=told)
    yield from _too_new(facts)
    for at, gpu in enumerate(known):
        if 0 < gpu.pcie_lanes < gpu.pcie_lanes_at_most:
            said = f"GPU {at} has {gpu.pcie_lanes} of {gpu.pcie_lanes_at_most} PCIe lanes."
            remedy = "Look at its slot and riser: copies to it are slow."
            yield Diagnosis("gpus", WARNING, said, remedy)
        if gpu.memory and gpu.memory_used > gpu.memory // 2:
            said = f"{size(gpu.memory_used)} of GPU {at}'s {size(gpu.memory)} are taken."
            yield Diagnosis("gpus", WARNING, said, "`nvidia-smi` shows by whom.")


def _of_torch_alone(gpus: Sequence[Mapping[str, Any]]) -> Iterator[Diagnosis]:
    names = ", ".join(f"{gpu['name']} with {size(gpu['memory'])}" for gpu in gpus)
    said = f"torch knows {_gpus(len(gpus))} ({names}) that NVIDIA's driver does not list."
    remedy = "`unisono run` chooses GPUs by the driver's list; pass `-n` and choose in the program."
    yield Diagnosis("gpus", WARNING, said, remedy)


def _too_new(facts: Mapping[str, Any]) -> Iterator[Diagnosis]:
    """Name GPUs that torch has no kernels for."""
    built = {name.removeprefix("sm_") for name in facts.get("arch_list", ())}
    for gpu in facts.get("gpus", ()):
        major, minor = gpu["capability"]
        if built and not any(arch.startswith(str(major)) for arch in built):
            said = f"torch has no kernels for {gpu['name']} (capability {major}.{minor})."
            yield Diagnosis("gpus", WRONG, said, "Install a torch that is built for it.")


def judge_links(links: Mapping[tuple[int, int], str]) -> Iterator[Diagnosis]:
    """Say how GPUs are connected, by pairs of them."""
    if not links:
        return
    by_kind: dict[str, list[str]] = {}
    for (one, other), kind in sorted(links.items()):
        by_kind.setdefault(kind, []).append(f"{one}–{other}")
    told = "; ".join(f"{kind}: {', '.join(pairs)}" for kind, pairs in by_kind.items())
    facts = {"links": {f"{one}-{other}": kind for (one, other), kind in links.items()}}
    yield Diagnosis("gpu-links", FINE, f"{told}.", facts=facts)


def _gpus(count: int) -> str:
    return f"{count} GPU{'s' * (count != 1)}"
