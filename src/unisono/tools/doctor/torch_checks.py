"""Can this torch train here, and does it find GPUs?

A separate process, ``python -m unisono.tools.doctor.torch_checks``, loads torch: a broken one may
end the process, or never return.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from unisono.runtime.launch.placement import DriverGpu
from unisono.runtime.notices import size
from unisono.tools.verify.findings import OK, WARNING, WRONG, Finding

_OLDEST = (2, 11)
_ON_CPUS = "CPUs alone"
_TIMEOUT_S = 90.0  # from a cold disk


class TorchFailedError(Exception):
    """torch could not be loaded."""


def torch_and_gpus(environ: Mapping[str, str], known: Sequence[DriverGpu]) -> Iterator[Finding]:
    """Yield findings about torch, and about GPUs."""
    facts: dict[str, Any] = {}
    try:
        os.getcwd()
        facts = facts_in_child(environ)
        yield judge_torch(facts, len(known))
    except FileNotFoundError:
        said = "torch cannot be loaded here: the working directory has been deleted."
        yield Finding("torch", WRONG, said, "Change to another directory.")
    except TorchFailedError as error:
        remedy = 'Run `python -c "import torch"`, and reinstall torch.'
        yield Finding("torch", WRONG, f"torch cannot be loaded: {error}.", remedy)
    yield from judge_gpus(facts, known)


def facts_in_child(environ: Mapping[str, str], timeout_s: float = _TIMEOUT_S) -> dict[str, Any]:
    """Load torch in another process, and return its facts."""
    # -P: torch shall not import a `random.py` of the working folder.
    command = [sys.executable, "-P", "-m", "unisono.tools.doctor.torch_checks"]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=timeout_s, env=dict(environ)
        )
    except subprocess.TimeoutExpired:
        raise TorchFailedError(f"no answer within {timeout_s:.0f} s") from None
    if done.returncode:
        last = (done.stderr.strip() or f"exit status {done.returncode}").splitlines()[-1]
        raise TorchFailedError(last[:300])
    facts: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return facts


def judge_torch(facts: Mapping[str, Any], num_gpus: int) -> Finding:
    """Judge the version of torch and what it was built for."""
    version, built = facts["version"], facts["built_for"]
    said = f"torch {version}, built for {built}"
    if tuple(map(int, re.findall(r"\d+", version)[:2])) < _OLDEST:
        remedy = "Install torch 2.11 or newer: `pip install --upgrade torch`."
        return Finding("torch", WRONG, f"{said}, is too old.", remedy)
    if num_gpus and built == _ON_CPUS:
        said += f", cannot use this machine's {num_gpus} GPU{'s' * (num_gpus > 1)}."
        remedy = "Install a torch for CUDA, or compute on the CPU with `CUDA_VISIBLE_DEVICES=`."
        return Finding("torch", WRONG, said, remedy)
    return Finding("torch", OK, f"{said}.")


def judge_gpus(facts: Mapping[str, Any], known: Sequence[DriverGpu]) -> Iterator[Finding]:
    """Judge the GPUs that the driver knows, and what torch reports about them, if anything."""
    if not known:
        said = "No GPU: NVIDIA's driver knows of none here. Workers compute on the CPU."
        yield Finding("gpus", OK, said)
        return
    names = ", ".join(f"{at}: {gpu.name} with {size(gpu.memory)}" for at, gpu in enumerate(known))
    if trouble := facts.get("gpu_trouble"):
        remedy = "Look with `nvidia-smi`; the driver must be new enough for torch's CUDA."
        yield Finding("gpus", WRONG, f"{names}, but torch says: {trouble}", remedy)
        return
    yield Finding("gpus", OK, f"{names}.")
    for name in facts.get("without_kernels", ()):
        said = f"torch has no kernels for {name}."
        yield Finding("gpus", WRONG, said, "Install a torch that is built for it.")
    for at, gpu in enumerate(known):
        if gpu.memory_used > gpu.memory // 2:
            said = f"{size(gpu.memory_used)} of GPU {at}'s {size(gpu.memory)} are taken."
            yield Finding("gpus", WARNING, said, "`nvidia-smi` shows by whom.")


def facts_of_torch() -> dict[str, Any]:
    """Load torch and return facts about it."""
    import torch as typed

    torch: Any = typed
    facts = {"version": str(torch.__version__), "built_for": _ON_CPUS}
    if not torch.version.cuda and not torch.version.hip:
        return facts
    facts["built_for"] = f"CUDA {torch.version.cuda}" if torch.version.cuda else "ROCm"
    try:
        torch.cuda.init()
    except Exception as error:
        return {**facts, "gpu_trouble": str(error).partition("\n")[0]}
    gpus = [torch.cuda.get_device_properties(at) for at in range(torch.cuda.device_count())]
    majors = {re.sub(r"\D", "", name)[:-1] for name in torch.cuda.get_arch_list()}
    missing = [gpu.name for gpu in gpus if majors and str(gpu.major) not in majors]
    return {**facts, "without_kernels": missing}


if __name__ == "__main__":
    print(json.dumps(facts_of_torch()))
