"""Which variables of the environment are bad for training here?"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from unisono.faults import FAULTS_VARIABLE
from unisono.launch.gpus import VISIBLE_VARIABLE, visible_gpus
from unisono.notices import shown
from unisono.verdicts import OK, WARNING, WRONG, Finding
from unisono.world import world

_OFF = ("", "0", "false", "off", "info")
_BITS = "changes the bits of results, and is part of no checkpoint"
_RULES = {
    FAULTS_VARIABLE: "has workers fail on purpose",
    "CUDA_LAUNCH_BLOCKING": "makes training slow: the host waits for every kernel",
    "TORCH_DISTRIBUTED_DEBUG": "makes training slow: ranks compare all collectives",
    "NCCL_P2P_DISABLE": "makes training slow: GPUs do not copy to each other",
    "MALLOC_PERTURB_": "makes training slow: all memory is written twice",
    "OMP_PROC_BIND": "binds the threads of all workers to the same cores",
    "NVIDIA_TF32_OVERRIDE": _BITS,
    "ATEN_CPU_CAPABILITY": _BITS,
    "MKL_CBWR": _BITS,
}
_INTERFACES = ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME")


def judge_settings(
    environ: Mapping[str, str], interfaces: Sequence[str], gpus: Sequence[str]
) -> Iterator[Finding]:
    """Judge the variables of an environment.

    Args:
        environ: the variables.
        interfaces: of the network, by name.
        gpus: the unique names of those that the driver knows.
    """
    found = [
        *_by_table(environ),
        *_of_interfaces(environ, interfaces),
        *_of_gpus(environ, gpus),
        *_of_ranks(environ),
    ]
    yield from found
    if not found:
        yield Finding("settings", OK, "No variable of the environment is in the way.")


def _by_table(environ: Mapping[str, str]) -> Iterator[Finding]:
    for name, value in sorted(environ.items()):
        why = _RULES.get(name, "")
        if why == _BITS or (why and value.lower() not in _OFF):
            verdict = WRONG if name == FAULTS_VARIABLE else WARNING
            said = f"{name}={shown(value, 60)} {why}."
            yield Finding("settings", verdict, said, "Unset it unless you mean it.")


def _of_interfaces(environ: Mapping[str, str], there: Sequence[str]) -> Iterator[Finding]:
    for name in _INTERFACES:
        wanted = environ.get(name, "")
        asked = [one.strip().lstrip("=") for one in wanted.split(",")]
        is_there = any(known.startswith(one) for one in asked for known in there)
        if not is_there and not wanted.startswith("^"):
            said = (
                f"{name}={shown(wanted, 60)} names no interface of this machine "
                f"({', '.join(there)}), so ranks cannot meet."
            )
            yield Finding("settings", WRONG, said, "Unset it, or name one that is there.")


def _of_gpus(environ: Mapping[str, str], gpus: Sequence[str]) -> Iterator[Finding]:
    text = environ.get(VISIBLE_VARIABLE)
    if text is None or not gpus:
        return
    seen = visible_gpus(environ, gpus)
    asked = [part for part in text.split(",") if part.strip()]
    said = f"{VISIBLE_VARIABLE}={shown(text, 60)} shows {len(seen)} of {len(gpus)} GPUs"
    if len(seen) < len(asked):
        remedy = "`nvidia-smi -L` lists them; unset it to see all."
        yield Finding("settings", WRONG, f"{said}, fewer than it names.", remedy)
    elif len(seen) < len(gpus):
        remedy = "Unset it to see all, or choose with `unisono run --gpus`."
        yield Finding("settings", WARNING, f"{said}.", remedy)


def _of_ranks(environ: Mapping[str, str]) -> Iterator[Finding]:
    try:
        here = world(environ)
    except ValueError as error:
        yield Finding("settings", WRONG, str(error), "See above.")
        return
    if here.world_size > 1:
        said = (
            f"The environment says that this is rank {here.rank} of {here.world_size}, so a "
            "program that is started here waits for the others."
        )
        remedy = "Unset RANK, WORLD_SIZE and the like, unless a launcher has started this."
        yield Finding("settings", WARNING, said, remedy)
