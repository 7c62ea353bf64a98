"""What determines the bits of a run? Compared between workers, and with a checkpoint.

Do two devices compute the same bits? Each computes a hash from a few fixed numbers: matrix products
of several sizes, convolutions, normalization, attention and random draws, forward and backward, in
each precision. Equal hashes suggest that devices agree; they prove nothing. On the CPU, where draws
and the form of attention depend on nothing else, products and layers take a few milliseconds.
The input is the same everywhere: uniform numbers of the CPU's generator, which rounds none.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import platform
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.optim import Optimizer

from unisono.engine.state.contents import updated_parameters
from unisono.engine.state.optimizers import kind_of
from unisono.errors import CheckpointError, MismatchError
from unisono.plan.samples import SamplePlan
from unisono.runtime import __version__
from unisono.runtime.checkpoint.remote import masked
from unisono.runtime.device import HOST, Device, in_rows, num_threads
from unisono.runtime.notices import listed
from unisono.runtime.procfs import read_text
from unisono.runtime.workers.supervisor import COMMAND_VARIABLE, has_launcher
from unisono.runtime.workers.team import Team
from unisono.runtime.world import threads_per_worker, world
from unisono.training.computing import arithmetic_in_words, deterministic_kernels, tf32_in_words

LENGTH = "dataset length"
_OF_ONE_LOOP = ("batch_size", "shuffle", "sampler", LENGTH)
_OTHER_FINGERPRINT = (
    "this machine computes other bits than the one that wrote the checkpoint, although both are "
    "{!r} (fingerprint {:.20} there, {} here)"
)
_OTHER_DATA = "the dataset is not that of the checkpoint: {} was {!r:.80} there and is {!r:.80} now"
_OTHER_BITS = ": training continues, but the result will differ from that of an uninterrupted run."
_MUST_STAY = ("seed", "shards", *_OF_ONE_LOOP, "optimizer")


FINGERPRINT = "fingerprint"
SAMPLES = "samples"  # contents of a few samples, by name; a new hash needs a new name
# If one of these differs, a different fingerprint is expected.
IMPLY_FINGERPRINT = ("processor", "torch", "threads", "tf32", "arithmetic")


def identity(
    plan: SamplePlan, fixed: Mapping[str, Any], device: Device, *, is_kept: bool
) -> dict[str, Any]:
    """Return what determines a run's bits; with the device's fingerprint if it is saved."""
    return {
        "seed": plan.seed,
        "shards": plan.shards,
        "batch_size": plan.batch_size,
        "sampler": plan.sampler,
        "shuffle": plan.shuffle,
        LENGTH: known_length(plan),
        **switches_of(device),
        **fixed,
        "threads": threads_per_worker(),
        "torch": torch.__version__,
        "processor": device.facts,
        **({FINGERPRINT: fingerprint_of(device)} if is_kept else {}),
    }


def known_length(plan: SamplePlan) -> int | None:
    """Return the number of samples of an epoch, for a run's identity; None if unknown."""
    return None if plan.is_endless else plan.num_samples


def switches_of(device: Device) -> dict[str, str]:
    """Return the switches of torch's arithmetic that a program has changed."""
    said = {"arithmetic": arithmetic_in_words()}
    return said if device.is_host else {**said, "tf32": tf32_in_words()}


def check_switches(identity: Mapping[str, Any], device: Device) -> None:
    """Raise RuntimeError if a switch changed in a loop: a worker that joins would not have it."""
    for name, value in switches_of(device).items():
        if identity[name] != value:
            raise RuntimeError(
                f"torch's settings of arithmetic changed during a loop, from {identity[name]!r} to "
                f"{value!r}, but a worker that joins the loop starts with the old ones: change "
                f"them before the loop."
            )


def fixed_by(model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    """Return what identifies an optimizer in a run: its kind, and what it updates."""
    names = list(updated_parameters(model, optimizer))
    return {
        "optimizer": kind_of(optimizer),
        "updated parameters": f"{len(names)} from `{names[0]}` to `{names[-1]}`",
    }


def of_every_loop(identity: Mapping[str, Any]) -> dict[str, Any]:
    """Return a run's identity without what may differ between its loops."""
    of_one = (*_OF_ONE_LOOP, SAMPLES)
    return {name: value for name, value in identity.items() if name not in of_one}


def compare(
    old: Mapping[str, Any],
    new: Mapping[str, Any],
    *,
    in_epoch: int | None = None,
    takes_program: bool = False,
) -> list[str]:
    """Compare a checkpoint's identity with that of the run that resumes from it.

    The checkpoint was written `in_epoch`, or between two (None). Return warnings about what changes
    bits; raise CheckpointError for what determines samples or updates.
    """
    differ = [name for name, value in new.items() if name in old and old[name] != value]
    warnings = []
    for name in differ:
        value = new[name]
        if name in _OF_ONE_LOOP and takes_program and in_epoch is None:
            warnings.append(
                f"`{name}` was {old[name]!r:.200} in the checkpoint and is {value!r} now: the "
                f"following epochs use the new value"
            )
            continue
        if name in _MUST_STAY:
            until, way = "", ""
            if name in _OF_ONE_LOOP:
                until = "" if in_epoch is None else f" until epoch {in_epoch} has ended"
                way = '`Checkpoint(options="program")` to train on with this, '
            raise CheckpointError(
                f"`{name}` must be {old[name]!r:.200} as in the checkpoint, but is {value!r}: pass "
                f'the old value{until}, {way}another `directory`, or `Checkpoint(resume="never")`.'
            )
        if name == SAMPLES:
            continue  # see `other_data`
        if name == FINGERPRINT:
            is_news = value and old[name] and not set(differ) & set(IMPLY_FINGERPRINT)
            told = [_OTHER_FINGERPRINT.format(new["processor"], old[name], value)] * bool(is_news)
        else:
            told = [f"{name} was {old[name]!r:.200} in the checkpoint and is {value!r} now"]
        warnings += [f"{line}{_OTHER_BITS}" for line in told]
    return warnings


def other_data(old: Mapping[str, Any], new: Mapping[str, Any], *, takes_program: bool) -> str:
    """Return how a run's data differ from its checkpoint's; raise unless they are to be used."""
    there, here = old.get(SAMPLES), new.get(SAMPLES)
    if not isinstance(there, dict) or not isinstance(here, dict):
        return ""
    if old.get(LENGTH) != new.get(LENGTH):
        return ""  # with more samples, different ones are hashed
    others = [key for key in here if there.get(key, here[key]) != here[key]]
    if not others:
        return ""
    told = _OTHER_DATA.format(others[0], there[others[0]], here[others[0]])
    if takes_program:
        return f"{told}{_OTHER_BITS}"
    raise CheckpointError(
        f"a run that resumes must have the data of its checkpoint, but {told}: pass a directory "
        f'for each dataset, such as `directory=f"runs/{{fold}}"`, `Checkpoint(options="program")` '
        f'to train on with this one, or `Checkpoint(resume="never")` to start over.'
    )


_SEED = 20
_HASH_BYTES = 8
# Rows, inner size and columns: one product with odd edges, and one with an inner size so long that
# a GPU splits the sum over it among its processors.
_PRODUCTS = ((33, 129, 65), (8, 1024, 8))
_LARGE_PRODUCTS = ((256, 256, 256), (16, 8192, 16))
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# A GPU's draws depend on how many threads it runs at once, if these are fewer than the numbers.
_NUM_DRAWS, _KEPT_OF_DRAWS = 2**21, 509


def fingerprint_of(device: Device) -> str:
    """Hash what a device computes, once per process and switches; "" if it cannot compute it."""
    if device.is_divided:  # one hash, if the parts are alike
        return " ".join(dict.fromkeys(map(fingerprint_of, device.parts)))
    known, key = _known(), " ".join([device.name, *switches_of(device).values()])
    if key not in known:
        known[key] = _fingerprint(device)
    return known[key]


def compare_devices(device: Device, team: Team, *, exact: bool) -> str:
    """Compare the bits that devices compute; return a warning if they differ. Collective."""
    if team.size == 1 or (device.is_host and len(team.hosts) == 1):
        return ""
    mine = json.dumps([device.facts, fingerprint_of(device)]).encode()
    heard = {r: json.loads(m) for r, m in team.gather(mine, "comparing devices").items()}
    kinds = kinds_of(heard)
    if len(set(kinds.values())) < 2:
        return ""
    who = _who(kinds, {rank: facts.partition(",")[0] for rank, (facts, _) in heard.items()})
    if device.is_host:
        raise MismatchError(
            f"the processors of all hosts must compute the same bits, but do not ({who}): use "
            f"hosts of one kind, or set ATEN_CPU_CAPABILITY, ONEDNN_MAX_CPU_ISA and MKL_CBWR on "
            f"all of them to the same values, which each supports."
        )
    if exact:
        raise MismatchError(
            f"the devices of all workers must compute the same bits, but do not ({who}): use "
            f"devices of one model; or pass `precision=Precision(exact=False)` (to a `Run`: "
            f"`exact=False`), and the workers agree up to rounding."
        )
    return (
        f"the workers' devices round differently ({who}): the result depends on which worker "
        f"computes which shard"
    )


def kinds_of(heard: Mapping[int, tuple[str, str]]) -> dict[int, str]:
    """Return by rank what identifies a device's bits, given the facts and fingerprints of all.

    If a device had no memory for a fingerprint, only the facts are compared.
    """
    are_known = all(fingerprint for _, fingerprint in heard.values())
    return {rank: said[1] if are_known else said[0] for rank, said in heard.items()}


def _who(kinds: Mapping[int, str], names: Mapping[int, str]) -> str:
    groups: dict[tuple[str, str], list[int]] = {}
    for rank, kind in kinds.items():
        groups.setdefault((names[rank], kind), []).append(rank)
    is_plain = len({name for name, _ in groups}) == len(groups)
    return " and ".join(
        f"{name if is_plain else f'{name} ({kind})'} on {listed('rank', ranks)}"
        for (name, kind), ranks in groups.items()
    )


@functools.cache
def _known() -> dict[str, str]:
    return {}


def _fingerprint(device: Device) -> str:
    source = torch.Generator().manual_seed(_SEED)
    try:
        with (
            device.generators_put_back(),
            num_threads(threads_per_worker()),
            deterministic_kernels(not device.is_host),
            torch.inference_mode(False),
            torch.enable_grad(),
            torch.autocast(device.torch.type, enabled=False),
        ):
            computed = list(_computed(device, source))
            flat = torch.cat([each.detach().reshape(-1).view(torch.uint8) for each in computed])
        return hashlib.blake2b(in_rows(flat), digest_size=_HASH_BYTES).hexdigest()
    except (RuntimeError, TypeError, ValueError):  # no memory, or a mode set by the program
        return ""


def _computed(device: Device, source: torch.Generator) -> Iterator[torch.Tensor]:
    def numbers(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        drawn = torch.rand(shape, generator=source, dtype=torch.float32, device=HOST) - 0.5
        return drawn.to(dtype).to(device.torch).requires_grad_()

    yield from _layers(numbers, _PRODUCTS)
    if device.is_host:
        return
    for dtype in _DTYPES:
        there = functools.partial(numbers, dtype=dtype)
        yield from _layers(there, _LARGE_PRODUCTS)
        yield from _attention(there)
    device.seed(_SEED)
    yield from _draws(device.torch)


def _layers(
    numbers: Callable[..., torch.Tensor], products: Sequence[tuple[int, int, int]]
) -> Iterator[torch.Tensor]:
    """Yield results and gradients of the operations that networks consist of."""
    for rows, inner, columns in products:
        left, right = numbers(rows, inner), numbers(inner, columns)
        yield from _with_gradients(left @ right, left, right)
    images, filters = numbers(2, 8, 9, 9), numbers(16, 8, 3, 3)
    convolved = F.conv2d(images, filters, padding=1)
    normed = F.gelu(F.batch_norm(convolved, None, None, training=True))
    yield from _with_gradients(normed, images, filters)
    hidden = numbers(20, 96)
    yield from _with_gradients(F.log_softmax(F.layer_norm(hidden, (96,)), 1), hidden)


def _attention(numbers: Callable[..., torch.Tensor]) -> Iterator[torch.Tensor]:
    queries, keys, values = (numbers(2, 2, 33, 32) for _ in range(3))
    seen = F.scaled_dot_product_attention(queries, keys, values, is_causal=True)
    yield from _with_gradients(seen, queries, keys, values)


def _with_gradients(result: torch.Tensor, *given: torch.Tensor) -> Iterator[torch.Tensor]:
    yield result
    yield from torch.autograd.grad(result, given, result.detach())


def _draws(device: torch.device) -> Iterator[torch.Tensor]:
    """Yield random numbers, drawn as layers draw them."""
    ones = torch.ones(_NUM_DRAWS, dtype=torch.float32, device=device)
    for drawn in (
        torch.rand_like(ones),
        torch.randn_like(ones),
        F.dropout(ones, 0.3),
        torch.bernoulli(ones * 0.3),
    ):
        yield drawn[::_KEPT_OF_DRAWS].contiguous()
    yield torch.randperm(1000, device=device)


def environment_facts(device: Device) -> dict[str, Any]:
    """Return where this process runs, as JSON: command, folder, host, versions, machine."""
    uname = platform.uname()
    own = {} if device.is_host else {"device": device.model, "device_bytes": device.room()[1]}
    return {
        "command": [masked(word) for word in _command()],
        "folder": _folder(),
        "host": uname.node,
        "versions": {
            "unisono": __version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
        },
        "machine": {
            "processor": _processor(),
            "cores": os.cpu_count(),
            "system": f"{uname.system} {uname.release}",
            **own,
        },
    }


def _folder() -> str | None:
    """Return the working directory; None if it was removed."""
    try:
        return os.getcwd()
    except OSError:
        return None


def _command() -> list[str]:
    """Return the command that the user ran, as far as this process knows."""
    if has_launcher() and COMMAND_VARIABLE in os.environ:
        return shlex.split(os.environ[COMMAND_VARIABLE])
    here = world()
    if here.started_by == "torchrun":
        return ["torchrun", f"--nproc-per-node={here.world_size}", *sys.argv]
    return ["python", *sys.orig_argv[1:]]  # with `-m package.train`, as `sys.argv` has a path


def _processor() -> str:
    """Return the processor's name from the kernel, or else its architecture."""
    lines = read_text(Path("/proc/cpuinfo")).splitlines()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())
