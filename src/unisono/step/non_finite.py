"""What has made a loss, or gradients, not finite? Found by computing a shard once more.

In a step that fails anyway, a shard's batch goes through the model again, with the same samples,
random numbers and buffers, while hooks look at what goes into each module and what comes out::

    a loss       parameters ─► the batch ─► modules in the order of the forward pass ─► the loss
    gradients    every loss is finite ─► nodes in the order of the backward pass

The worker that computed the shard looks, and tells the others what to say. Steps that succeed cost
nothing.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack, suppress
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.autograd.graph import Node
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from unisono.errors import NonFiniteLossError
from unisono.notices import listed
from unisono.state.contents import updated_parameters
from unisono.step.graph_notes import Notes, graph_of, in_words, noted
from unisono.step.loss import read_loss
from unisono.step.module_outputs import (
    BadOutput,
    Finiteness,
    ModuleOutputs,
    outputs_watched,
    values_of,
)

_SAMPLES_AT_MOST = 8
_PARAMETERS = "; the parameters are "  # in every message
_LOOK_THERE = "look there for a division by zero or the logarithm or square root of zero"


class NonFiniteCause(NamedTuple):
    """What is said of it; travels as JSON.

    Attributes:
        what: where it comes from.
        remedy: what to do.
        module, file, line: see :class:`NonFiniteLossError`.
        parameters: their names, whose values or gradients are not finite.
        shard: where gradients are not finite.
    """

    what: str = ""
    remedy: str = ""
    module: str | None = None
    file: str = ""
    line: int = 0
    parameters: tuple[str, ...] = ()
    shard: int | None = None

    def explain(self, error: NonFiniteLossError) -> NonFiniteLossError:
        """Make of an error one that says where it comes from."""
        said, parameters, rest = str(error).partition(_PARAMETERS)
        kept, _, remedy = rest.partition(": ")
        return NonFiniteLossError(
            f"{said}: {self.what}{parameters}{kept}: {self.remedy or remedy}",
            step=error.step,
            shard=error.shard,
            value=error.value,
            module=self.module,
            file=self.file,
            line=self.line,
            parameters=tuple(self.parameters),
        )


class NonFiniteSearch:
    """Looks for what is not finite in the steps of one loop. Final.

    Attributes:
        computing: the model that computes a shard once more: that one, or its copy on another
            device.
        is_repeating: whether a shard is computed once more now.
        bad_gradients: the positions of parameters whose summed gradients are not finite, among
            those that the optimizer updates.
    """

    def __init__(self, model: nn.Module, optimizer: Optimizer) -> None:
        self._model, self._optimizer = model, optimizer
        self.computing = model
        self._stack = ExitStack()
        self._outputs: ModuleOutputs | None = None
        self._batch: Any = None
        self._loss = math.nan
        self.is_repeating = False
        self.bad_gradients: set[int] = set()

    def begin_again(self, batch: Any) -> None:
        """Watch the forward pass over a batch that comes next."""
        self._batch, self.is_repeating = batch, True
        with suppress(Exception):
            self._outputs = self._stack.enter_context(outputs_watched(self.computing))

    def take(self, returned: Any, num_samples: int) -> None:
        """Take what the loss function has returned for it."""
        self._stack.close()
        total, weight = read_loss(returned, num_samples).numbers()["loss"]
        self._loss = total / weight if weight else total

    def close(self) -> None:
        """Watch nothing any more."""
        self._stack.close()
        self.is_repeating, self._batch = False, None

    def note_gradients(self, gradients: Iterable[tuple[int, torch.Tensor]]) -> None:
        """Note of which parameters the summed gradients are not finite."""
        self.bad_gradients = {
            at for at, total in gradients if values_of(total) != Finiteness.FINITE
        }

    def of_loss(self, samples: Sequence[int]) -> NonFiniteCause | None:
        """Say what has made a loss not finite, after its shard was computed once more.

        Args:
            samples: of the shard, by their numbers in the dataset.

        Returns:
            None: it was not.
        """
        if names := _bad_tensors(self._model):
            return _in_parameters(names)
        if self._outputs is None:
            return None
        if math.isfinite(self._loss):
            return NonFiniteCause(
                f"computed once more, from the same samples and random numbers, it is "
                f"{self._loss:g}",
                "look for values that the loss function keeps or that depend on the rank, or for "
                "a device that computes wrong.",
            )
        bad = _bad_samples(self._batch, samples)
        first = self._outputs.first
        if first is None:
            return _in_the_loss(bad)
        return _in_a_module(first, bad)

    def of_gradients(
        self,
        shards: Iterable[int],
        compute: Callable[[int], Any],
        differentiate: Callable[..., Any],
    ) -> NonFiniteCause:
        """Say which operation's gradient is the first that is not finite.

        Args:
            shards: those that this worker has computed.
            compute: computes a shard's loss once more.
            differentiate: takes a shard and what the loss function returned; passes backward.
        """
        names = list(updated_parameters(self._model, self._optimizer))
        bad = tuple(names[at] for at in sorted(self.bad_gradients))
        for shard in shards:
            with suppress(Exception), noted(self.computing) as notes:
                returned = compute(shard)
                torch.set_anomaly_enabled(False)
                watch = _Backward(tree_leaves(returned))
                differentiate(shard, returned)
                if watch.first is not None:
                    return _at_a_node(watch.first, notes, shard, bad, len(names))
        return NonFiniteCause(parameters=bad)

    def together(self, heard: Iterable[bytes]) -> NonFiniteCause | None:
        """Choose among what workers have found: of the first shard, with all parameters.

        Args:
            heard: what :func:`in_json` has made of it.
        """
        found = [NonFiniteCause(*json.loads(told)) for told in heard if told]
        named = {name for finding in found for name in finding.parameters}
        names = tuple(name for name, _ in _tensors(self._model) if name in named)
        placed = [finding for finding in found if finding.what]
        if placed:
            best = min(placed, key=lambda finding: finding.shard or 0)
            return best._replace(parameters=names)
        return _by_name(names) if names else None


def in_json(finding: NonFiniteCause | None) -> bytes:
    """Put a finding into bytes for the others; nothing for none."""
    return b"" if finding is None else json.dumps(finding).encode()


class _Backward:
    """Which node of a graph is the first to give a gradient that is not finite? Final."""

    def __init__(self, returned: Sequence[Any]) -> None:
        self.first: tuple[Node, Finiteness] | None = None
        for node in graph_of(returned):
            node.register_hook(self._looking_at(node))

    def _looking_at(self, node: Node) -> Callable[[Any, Any], None]:
        def look(given: Any, received: Any) -> None:
            if self.first is None and values_of(given) != Finiteness.FINITE:
                self.first = node, values_of(received)

        return look


def _bad_tensors(model: nn.Module) -> list[str]:
    """Name parameters that are not finite, and buffers that hold NaN or +inf."""
    return [
        name
        for name, tensor in _tensors(model)
        if values_of(tensor)
        > (Finiteness.FINITE if isinstance(tensor, nn.Parameter) else Finiteness.MASK)
    ]


def _tensors(model: nn.Module) -> list[tuple[str, torch.Tensor]]:
    return [*model.named_parameters(), *model.named_buffers()]


def _bad_samples(batch: Any, samples: Sequence[int]) -> list[int]:
    """Number the samples of a batch that have values that are not finite."""
    rows: set[int] = set()
    for leaf in tree_leaves(batch):
        if values_of(leaf) == Finiteness.BAD and leaf.ndim and len(leaf) == len(samples):
            bad = ~torch.isfinite(leaf.detach()).reshape(len(leaf), -1).all(1)
            rows |= set(bad.nonzero().flatten().tolist())
    return [samples[row] for row in sorted(rows)]


def _in_parameters(names: list[str]) -> NonFiniteCause:
    are, more = "is", len(names) - 1
    if more:
        are = f"and {more} more parameter{'s or buffers' if more > 1 else ' or buffer'} are"
    return NonFiniteCause(
        f"`{names[0]}` {are} not finite as the step begins",
        "if an earlier update has made that, pass `clip_norm=math.inf`, which looks at the "
        "gradients before every update, and go on from an earlier checkpoint; lower the learning "
        "rate.",
        parameters=tuple(names),
    )


def _in_the_loss(bad: list[int]) -> NonFiniteCause:
    also = f", and {_samples(bad)} values that are not finite" if bad else ""
    return NonFiniteCause(
        f"the output of every module is finite, so the loss function makes it{also}",
        f"{_LOOK_THERE}.",
    )


def _in_a_module(first: BadOutput, bad: list[int]) -> NonFiniteCause:
    place = first.place
    what = f"the first output that is not finite is that of {in_words(place)}, whose input "
    if first.input == Finiteness.BAD:
        what += "is not finite already"
        what += f", as {_samples(bad)} such values" if bad else ""
        remedy = "look at that data." if bad else f"look at what computes it: {_LOOK_THERE}."
    else:
        masked = first.input == Finiteness.MASK
        what += "is finite" + (" but for −inf, as in masks" if masked else "")
        remedy = f"{_LOOK_THERE} or an overflow, or lower the learning rate."
        if masked:
            remedy = f"look for a row that is masked as a whole, or {remedy.removeprefix('look ')}"
    return NonFiniteCause(what, remedy, place.module, place.file, place.line)


def _by_name(names: Sequence[str]) -> NonFiniteCause:
    if len(names) == 1:
        return NonFiniteCause(f"the gradient of `{names[0]}` is not", parameters=tuple(names))
    return NonFiniteCause(
        f"the gradients of {len(names)} parameters are not, and `{names[-1]}` is the last of them "
        f"in the model",
        f"look at what comes after `{names[-1]}` in the model's forward pass for a division by "
        f"zero or the square root of zero, or lower the learning rate.",
        parameters=tuple(names),
    )


def _samples(bad: list[int]) -> str:
    more = len(bad) - _SAMPLES_AT_MOST
    few = listed("sample", bad[:_SAMPLES_AT_MOST])
    return few + (f" and {more} more have" if more > 0 else " has" if len(bad) == 1 else " have")


def _at_a_node(
    first: tuple[Node, Finiteness], notes: Notes, shard: int, bad: tuple[str, ...], num_all: int
) -> NonFiniteCause:
    node, received = first
    place = notes.place_of(node)
    operation = node.name().partition("Backward")[0].rpartition("::")[2]
    already = "" if received == Finiteness.FINITE else ", which gets one that is not finite already"
    return NonFiniteCause(
        f"in shard {shard} the first gradient that is not finite is that of `{operation}` in "
        f"{in_words(place)}{already}, and those of {len(bad)} of {num_all} parameters are not",
        f"{_LOOK_THERE}, or lower the learning rate.",
        place.module,
        place.file,
        place.line,
        bad,
        shard,
    )
