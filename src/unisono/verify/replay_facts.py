"""The bits of a program after a step: parameters, optimizer, generators, as digests by name."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from unisono.verify.sketches import digest_of, digest_of_tensor


def replay_facts(
    step: int | None,
    named: Sequence[tuple[str, torch.Tensor]],
    states: Mapping[str, Mapping[str, Any]],
) -> dict[str, Any]:
    """Hash what a resumed run must have again.

    Args:
        step: its number, where the program says it.
        named: the parameters.
        states: of the optimizer, by parameter.
    """
    return {
        "step": step,
        "parameters": {name: digest_of_tensor(parameter) for name, parameter in named},
        "optimizer": {
            f"{key} of {name}": _digest(value)
            for name, state in states.items()
            for key, value in state.items()
        },
        "generators": generator_digests(),
    }


def _digest(value: Any) -> str:
    return digest_of_tensor(value) if isinstance(value, torch.Tensor) else repr(value)


def generator_digests() -> dict[str, str]:
    """Hash the states of the generators that a dataset may draw from."""
    numpy_state: Any = np.random.get_state()
    states = {
        "torch": torch.get_rng_state().numpy().tobytes(),
        "numpy": numpy_state[1].tobytes() + str(numpy_state[2:]).encode(),
        "python": repr(random.getstate()).encode(),
    }
    return {k: digest_of(v) for k, v in states.items()}
