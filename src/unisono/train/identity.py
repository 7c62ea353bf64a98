"""What fixes the bits of a run? Compared between workers, and with a checkpoint.

Its code and its data belong to it, too, but are not compared here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from unisono.device import Device
from unisono.errors import CheckpointError
from unisono.plan.samples import SamplePlan
from unisono.state.contents import updated_parameters
from unisono.state.several_optimizers import kind_of
from unisono.train.device_fingerprint import fingerprint_of
from unisono.train.tf32 import TF32, tf32_in_words
from unisono.world import threads_per_worker

_OF_ONE_LOOP = ("batch_size", "shuffle", "sampler", "dataset length")
_OTHER_FINGERPRINT = (
    "this machine computes other bits than the one of the checkpoint, although both say that they "
    "are {!r} (fingerprint {:.20} there, {} here): the run goes on, but its bits will not be those "
    "of a run without a stop."
)
_OTHER_DATA = (
    "the data set is not that of the checkpoint, as {} was {!r:.80} there and is {!r:.80} now: the "
    "run goes on, but its bits will not be those of a run without a stop."
)
_MUST_STAY = ("seed", "shards", *_OF_ONE_LOOP, "optimizer")


FINGERPRINT = "fingerprint"
SAMPLES = "samples"  # what a few of them hold, by name; another hash of that needs another name
# Where one of these differs, another fingerprint is no news.
_IMPLY_FINGERPRINT = ("processor", "torch", "threads")


def identity(
    plan: SamplePlan, fixed: Mapping[str, Any], device: Device, *, is_kept: bool
) -> dict[str, Any]:
    """Say what fixes a run's bits.

    Args:
        plan: which samples are computed where.
        fixed: what the run adds.
        device: where this worker computes.
        is_kept: whether it is compared later, so that some milliseconds for a fingerprint of the
            device are well spent.
    """
    return {
        "seed": plan.seed,
        "shards": plan.shards,
        "batch_size": plan.batch_size,
        "sampler": plan.sampler,
        "shuffle": plan.shuffle,
        "dataset length": None if plan.is_endless else plan.num_samples,
        **({} if device.is_host else {TF32: tf32_in_words(None)}),
        **fixed,
        "threads": threads_per_worker(),
        "torch": torch.__version__,
        "processor": device.facts,
        **({FINGERPRINT: fingerprint_of(device)} if is_kept else {}),
    }


def fixed_by(model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    """Say what of an optimizer belongs to a run's identity: what it is, and what it updates."""
    names = list(updated_parameters(model, optimizer))
    return {
        "optimizer": kind_of(optimizer),
        "updated parameters": f"{len(names)} from `{names[0]}` to `{names[-1]}`",
    }


def of_every_loop(identity: Mapping[str, Any]) -> dict[str, Any]:
    """Leave out of a run's identity what another loop of it may have otherwise."""
    of_one = (*_OF_ONE_LOOP, SAMPLES)
    return {name: value for name, value in identity.items() if name not in of_one}


def compare(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """Compare the identity of a checkpoint with that of the run that resumes from it.

    Returns:
        Warnings: what differs and changes bits, but not what is trained on.

    Raises:
        CheckpointError: what decides over samples or updates differs; names old and new value.
    """
    differ = [name for name, value in new.items() if name in old and old[name] != value]
    warnings = []
    for name in differ:
        value = new[name]
        if name in _MUST_STAY:
            raise CheckpointError(
                f"`{name}` must be {old[name]!r:.200} as in the checkpoint, but is {value!r}: "
                f'pass the old value, another `directory`, or `resume="never"`.'
            )
        if name == SAMPLES:
            there = old[name] if isinstance(old[name], dict) else {}
            others = [key for key in value if there.get(key, value[key]) != value[key]]
            warnings += [_OTHER_DATA.format(key, there[key], value[key]) for key in others[:1]]
            continue
        if name == FINGERPRINT:
            if value and old[name] and not set(differ) & set(_IMPLY_FINGERPRINT):
                warnings.append(_OTHER_FINGERPRINT.format(new["processor"], old[name], value))
            continue
        warnings.append(
            f"{name} was {old[name]!r:.200} in the checkpoint and is {value!r} now: the run goes "
            f"on, but its bits will not be those of a run without a stop."
        )
    return warnings
