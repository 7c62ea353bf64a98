"""May GPUs round the factors of float32 products to TF32? Switched for a time, then put back.

torch has two sets of switches that must agree, and complains when one is read after the other was
set. Those for GPUs are set here by their old names, which set the new ones too; each value that
this or the putting back changes on the way is put back. Nothing of what is switched is looked at by
computations on the CPU.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

TF32 = "tf32"
"""Its name in the identity of a run."""


def tf32_in_words(tf32: bool | None) -> str:
    """Say what :func:`tf32_switched` leads to, for the identity of a run on an accelerator."""
    names = ("products", "convolutions", "recurrent layers")
    if tf32 is None:
        is_on = [switch.fp32_precision == "tf32" for switch in _new_switches()[: len(names)]]
    else:
        is_on = [tf32] * len(names)
    return ", ".join(name for name, there in zip(names, is_on, strict=True) if there) or "off"


@contextmanager
def tf32_switched(tf32: bool | None) -> Iterator[None]:
    """Allow or forbid TF32 within a block; None: leave it as it is."""
    if tf32 is None:
        yield
        return
    news = _new_switches()
    new_values = [switch.fp32_precision for switch in news]
    old_values = _old_values()
    if old_values is not None:
        torch.backends.cuda.matmul.allow_tf32 = tf32
        torch.backends.cudnn.allow_tf32 = tf32
    for switch in news[:3]:
        switch.fp32_precision = "tf32" if tf32 else "ieee"
    try:
        yield
    finally:
        if old_values is not None:
            product, torch.backends.cudnn.allow_tf32 = old_values
            torch.set_float32_matmul_precision(product)
        for switch, value in zip(news, new_values, strict=True):
            switch.fp32_precision = value


def _new_switches() -> list[Any]:
    """List the new switches: three for GPUs, and one that the old way of putting back changes."""
    backends: Any = torch.backends
    return [
        backends.cuda.matmul,
        backends.cudnn.conv,
        backends.cudnn.rnn,
        backends.mkldnn.matmul,
    ]


def _old_values() -> tuple[str, bool] | None:
    """Read the old switches; None where the new ones have been set to something else."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch would rather have the new ones read
        try:
            return torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
        except RuntimeError:
            return None
