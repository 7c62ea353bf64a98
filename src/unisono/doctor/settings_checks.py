"""Which variables of the environment are bad for training here? A table and some special cases."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from unisono.doctor.diagnoses import FINE, WARNING, WRONG, Diagnosis
from unisono.faults import FAULTS_VARIABLE
from unisono.launch.gpus import VISIBLE_VARIABLE, visible_gpus
from unisono.notices import shown
from unisono.world import threads_per_worker, world

_NO = ("", "0", "false", "off", "no")


def _is_on(value: str) -> bool:
    return value.lower() not in _NO


def _always(value: str) -> bool:
    return True


class _Rule(NamedTuple):
    """What is said of a variable.

    Attributes:
        name: of the variable; a `*` at the end stands for any letters.
        applies: to which values.
        why: what it does.
        remedy: what to do.
        verdict: how bad it is.
    """

    name: str
    applies: Callable[[str], bool]
    why: str
    remedy: str = "Unset it unless you mean it."
    verdict: str = WARNING


_SLOW, _BITS = "makes training slow", "changes the bits of results, and is part of no checkpoint"
_OF_BUILDS = ("VERSION", "HOME", "ROOT", "ROOT_DIR", "INCLUDE_DIR", "LIB_DIR", "CONF_FILE")
# The first rule for a variable counts.
_RULES = (
    _Rule(FAULTS_VARIABLE, _is_on, "has workers fail on purpose", "Unset it.", WRONG),
    _Rule("CUDA_LAUNCH_BLOCKING", _is_on, f"{_SLOW}: the host waits for every kernel"),
    _Rule("PYTORCH_NO_CUDA_MEMORY_CACHING", _is_on, f"{_SLOW}: every tensor is allocated anew"),
    _Rule("TORCH_DISTRIBUTED_DEBUG", lambda v: v.upper() == "DETAIL", f"{_SLOW}: ranks compare"),
    _Rule("TORCH_NCCL_BLOCKING_WAIT", _is_on, f"{_SLOW}: the host waits for every collective"),
    _Rule("TORCHDYNAMO_DISABLE", _is_on, "turns torch.compile off"),
    _Rule("TORCH_LOGS", _is_on, "prints what torch does"),
    _Rule("TORCH_ALLOW_TF32_CUBLAS_OVERRIDE", _always, _BITS),
    _Rule("NVIDIA_TF32_OVERRIDE", _always, _BITS),
    _Rule("TORCH_CUDNN_V8_API_DISABLED", _always, _BITS),
    _Rule("ATEN_CPU_CAPABILITY", _always, _BITS),
    _Rule("ONEDNN_MAX_CPU_ISA", _always, _BITS),
    _Rule("DNNL_MAX_CPU_ISA", _always, _BITS),
    _Rule("MKL_CBWR", _always, _BITS),
    _Rule("MKL_DEBUG_CPU_TYPE", _always, _BITS),
    _Rule("MKL_ENABLE_INSTRUCTIONS", _always, _BITS),
    _Rule(
        "CUBLAS_WORKSPACE_CONFIG",
        lambda value: value not in (":4096:8", ":16:8"),
        "lets products of matrices on GPUs differ from run to run",
        "Unset it; `unisono run` sets it to :4096:8.",
    ),
    _Rule("KMP_AFFINITY", _always, "may bind the threads of all workers to the same cores"),
    _Rule("GOMP_CPU_AFFINITY", _always, "binds the threads of all workers to the same cores"),
    _Rule("OMP_PROC_BIND", _is_on, "binds the threads of all workers to the same cores"),
    _Rule("OMP_PLACES", _always, "binds the threads of all workers to the same cores"),
    _Rule("MALLOC_CHECK_", _is_on, f"{_SLOW}: every allocation is checked"),
    _Rule("MALLOC_PERTURB_", _is_on, f"{_SLOW}: all memory is written twice"),
    _Rule("MALLOC_MMAP_THRESHOLD_", _always, "may make every large tensor a system call"),
    _Rule("MALLOC_TRIM_THRESHOLD_", _always, "may give memory back after each step"),
    _Rule("NCCL_DEBUG", lambda value: value.upper() in ("INFO", "TRACE"), "prints what NCCL does"),
    _Rule("NCCL_DEBUG", lambda value: False, ""),
    *(_Rule(f"NCCL_{what}", lambda value: False, "") for what in _OF_BUILDS),
    _Rule("NCCL_P2P_DISABLE", _is_on, f"{_SLOW}: GPUs do not copy to each other"),
    _Rule("NCCL_SHM_DISABLE", _is_on, f"{_SLOW}: GPUs of one host talk over the network"),
    _Rule("NCCL_IB_DISABLE", _is_on, "keeps NCCL from using InfiniBand"),
    _Rule("NCCL_*", _always, "is a setting of one machine, often left from copying"),
    _Rule("TORCH_NCCL_*", _always, "is a setting of one program, often left from copying"),
)
_INTERFACES = ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME")
_THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")


def judge_settings(
    environ: Mapping[str, str], num_cores: int, interfaces: Sequence[str], gpus: Sequence[str]
) -> Iterator[Diagnosis]:
    """Judge the variables of an environment.

    Args:
        environ: the variables.
        num_cores: that workers may use.
        interfaces: of the network, by name.
        gpus: the unique names of those that the driver knows.
    """
    found = [
        *_by_table(environ),
        *_of_interfaces(environ, interfaces),
        *_of_gpus(environ, gpus),
        *_of_ranks(environ),
        *_of_threads(environ, num_cores),
    ]
    yield from found
    if not found:
        yield Diagnosis("settings", FINE, "No variable of the environment is in the way.")


def _by_table(environ: Mapping[str, str]) -> Iterator[Diagnosis]:
    for name, value in sorted(environ.items()):
        rule = _rule_for(name, value)
        if rule is not None and rule.why:
            said = f"{shown(name)}={shown(value, 60)} {rule.why}."
            yield Diagnosis("settings", rule.verdict, said, rule.remedy, {"variable": name})


def _rule_for(name: str, value: str) -> _Rule | None:
    if name in _INTERFACES:
        return None
    exact = [rule for rule in _RULES if rule.name == name]
    for rule in exact:
        if rule.applies(value):
            return rule
    if exact:
        return None
    starred = (rule for rule in _RULES if rule.name.endswith("*"))
    return next((rule for rule in starred if name.startswith(rule.name[:-1])), None)


def _of_interfaces(environ: Mapping[str, str], there: Iterable[str]) -> Iterator[Diagnosis]:
    for name in _INTERFACES:
        wanted = environ.get(name, "")
        if not wanted or wanted.startswith("^"):
            continue
        asked = [one.strip().lstrip("=") for one in wanted.split(",")]
        if not any(known.startswith(one) for one in asked for known in there):
            yield Diagnosis(
                "settings",
                WRONG,
                f"{name}={shown(wanted, 60)} names no interface of this machine "
                f"({', '.join(there)}), so ranks cannot meet.",
                "Unset it, or name one that is there.",
                {"variable": name},
            )


def _of_gpus(environ: Mapping[str, str], gpus: Sequence[str]) -> Iterator[Diagnosis]:
    text = environ.get(VISIBLE_VARIABLE)
    if text is None or not gpus:
        return
    seen = visible_gpus(environ, gpus)
    asked = [part for part in text.split(",") if part.strip()]
    facts = {"variable": VISIBLE_VARIABLE, "visible": len(seen)}
    said = f"{VISIBLE_VARIABLE}={shown(text, 60)} shows {len(seen)} of {len(gpus)} GPUs"
    if len(seen) < len(asked) or (asked and not seen):
        remedy = "`nvidia-smi -L` lists them; unset it to see all."
        yield Diagnosis("settings", WRONG, f"{said}, fewer than it names.", remedy, facts)
    elif len(seen) < len(gpus):
        remedy = "Unset it to see all, or choose with `unisono run --gpus`."
        yield Diagnosis("settings", WARNING, f"{said}.", remedy, facts)


def _of_ranks(environ: Mapping[str, str]) -> Iterator[Diagnosis]:
    try:
        here = world(environ)
    except ValueError as error:
        yield Diagnosis("settings", WRONG, str(error), "See above.")
        return
    if here.world_size > 1:
        yield Diagnosis(
            "settings",
            WARNING,
            f"The environment says that this is rank {here.rank} of {here.world_size}, so a "
            "program that is started here waits for the others.",
            "Unset RANK, WORLD_SIZE and the like, unless a launcher has started this.",
        )


def _of_threads(environ: Mapping[str, str], num_cores: int) -> Iterator[Diagnosis]:
    try:
        threads = threads_per_worker(environ)
    except ValueError as error:
        yield Diagnosis("settings", WRONG, str(error), "See above.")
        return
    if threads > num_cores:
        yield Diagnosis(
            "settings",
            WARNING,
            f"UNISONO_THREADS={threads}, but there are {num_cores} cores: even one worker has more "
            "threads than can run.",
            "Unset it: one thread a worker is fastest most often.",
            {"variable": "UNISONO_THREADS"},
        )
    for name in _THREADS:
        value = environ.get(name, "")
        if value.isdecimal() and int(value) > 1 and 2 * int(value) > num_cores:
            yield Diagnosis(
                "settings",
                WARNING,
                f"{name}={value}: two workers of torchrun or mpirun have {2 * int(value)} threads "
                f"on {num_cores} cores. `unisono run` gives each worker UNISONO_THREADS instead.",
                f"Set it to {num_cores} divided by the number of workers, or to 1.",
                {"variable": name},
            )
