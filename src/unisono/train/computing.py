"""How are passes through a model computed? What a run is told about it, in one place.

Whatever changes bits belongs to the run's identity.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

from torch import nn

from unisono.train.channels import lay_out_channels_last, with_channels_last
from unisono.train.compiling import compile_forward, compiled_in_this_thread, find_compiler
from unisono.train.precision import DTYPES, in_precision
from unisono.train.step import Step
from unisono.train.tf32 import tf32_switched


@dataclass(frozen=True, slots=True)
class Computing:
    """How passes through a model are computed, in training, evaluation and prediction alike.

    Attributes:
        precision: one of :data:`DTYPES`.
        channels_last: whether images have their channels last in memory.
        tf32: whether GPUs may round factors to TF32; None: as the program has it.
        compile: whether the model's forward pass is compiled.

    Raises:
        ValueError: there is no such precision.
        TypeError: a switch is neither True nor False.
    """

    precision: str
    channels_last: bool
    tf32: bool | None
    compile: bool

    def __post_init__(self) -> None:
        if self.precision not in DTYPES:
            raise ValueError(
                f"`precision` must be one of {tuple(DTYPES)}, but is {self.precision!r}."
            )
        for name, value, others in (
            ("channels_last", self.channels_last, ""),
            ("tf32", self.tf32, ", or None"),
            ("compile", self.compile, ""),
        ):
            if not isinstance(value, bool) and not (others and value is None):
                raise TypeError(f"`{name}` must be True or False{others}, but is {value!r}.")

    @property
    def fixed(self) -> dict[str, Any]:
        """What of it changes bits, by name, as plain JSON, for the identity of a run.

        Raises:
            ValueError: there is nothing to compile with.
        """
        # Not tf32: it changes nothing on the CPU, where all models are.
        return {
            "precision": self.precision,
            "channels_last": self.channels_last,
            "compile": find_compiler() if self.compile else None,
        }

    def prepare(self, model: nn.Module) -> None:
        """Do to a model what is done once.

        Raises:
            ValueError: it cannot be computed so.
        """
        if self.channels_last:
            lay_out_channels_last(model)
        if self.compile:
            compile_forward(model)

    def of(self, compute: Callable[[nn.Module, Any], Any]) -> Callable[[nn.Module, Any], Any]:
        """Have a loss or a forward function computed so."""
        if self.channels_last:
            compute = with_channels_last(compute)
        return in_precision(self.precision, compute)

    @contextmanager
    def under_way(self) -> Iterator[None]:
        """Have torch's switches set within a block, and put back after it."""
        with tf32_switched(self.tf32), compiled_in_this_thread() if self.compile else nullcontext():
            yield

    def while_under_way(self, steps: Generator[Step, None, None]) -> Generator[Step, None, None]:
        """Have torch's switches set as long as a loop over steps is under way."""
        with self.under_way():
            yield from steps
