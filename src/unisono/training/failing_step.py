"""Why does a step fail? Explained in words.

If a loss is not finite, nothing is updated: at the end of `step.shards` the batch of the failing
shard is yielded again, and computed from what the step began with (the same parameters, samples,
random numbers and buffers) with hooks that watch it (``finiteness.py``). The worker that computes
the shard sends its findings to the others. Steps that succeed do none of this.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from traceback import walk_tb
from types import CodeType
from typing import Any, NamedTuple, final

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from unisono.engine.state.contents import named_parameters
from unisono.engine.step.engine import StepEngine
from unisono.engine.step.loss import read_loss
from unisono.engine.step.loss_scaling import SMALLEST
from unisono.errors import NondeterministicError, NonFiniteLossError, UnisonoError
from unisono.runtime.notices import shown, text_of
from unisono.runtime.world import WORKSPACE_VARIABLE
from unisono.training.failures import note_origin, samples_in_words
from unisono.training.finiteness import (
    BadOutput,
    CallSite,
    Finiteness,
    FinitenessHooks,
    innermost,
    values_of,
)
from unisono.training.out_of_memory import explained as of_full_memory
from unisono.training.run_context import RunContext

_PARAMETERS = "; the parameters are "  # in every message
_LOOK_THERE = "look there for a division by zero or the logarithm or square root of zero"


class Cause(NamedTuple):
    """What one worker knows about values that are not finite; sent as JSON."""

    what: str = ""
    remedy: str = ""
    parameters: Sequence[str] = ()
    module: str | None = None
    file: str = ""
    line: int = 0


@final
class Explanation:
    """Explains why one step fails."""

    def __init__(
        self, run: RunContext, number: int, indices: Callable[[int], Sequence[int]]
    ) -> None:
        assert run.engine is not None
        self._run, self._number, self._indices = run, number, indices
        self._engine: StepEngine = run.engine
        self._is_begun = False  # whether a shard is being computed again
        self._look: FinitenessHooks | None = None
        self._batch: Any = None
        self._loss = math.nan

    def check_memory(self, error: Exception, phase: str, shard: int | None = None) -> None:
        """Raise Unisono's error instead of torch's, if the memory is full."""
        ours = of_full_memory(error, self._run, phase, self._number, shard)
        if ours is not error:
            raise ours

    def note_update(self, error: Exception, in_step: str) -> None:
        """Add to an error that it came after the passes; raises as :meth:`check_memory` does."""
        if isinstance(error, RuntimeError):
            self.check_memory(error, "update")
        note_origin(error, f"{in_step}, in the sum of gradients or the update")

    def is_of(
        self, error: BaseException, in_step: str, shard: int | None, backward: CodeType
    ) -> bool:
        """Add to an exception what it is about; return False if it came from a second look."""
        if self._is_begun:
            self.close()
            if isinstance(error, Exception):
                return False
        codes = {frame.f_code for frame, _ in walk_tb(error.__traceback__)}
        what = "backward" if backward in codes else "forward"
        if self._run.is_deterministic and is_refusal(error):
            raise refused(error, self._engine.model, is_backward=backward in codes) from error
        if isinstance(error, RuntimeError):
            self.check_memory(error, "step" if shard is None else f"{what} pass", shard)
        if shard is not None:
            samples = ""
            with suppress(Exception):  # a sampler may raise; the first error counts
                samples = f", over {samples_in_words(self._indices(shard))}"
            in_step = f"{in_step}, in the {what} pass of shard {shard}{samples}"
        note_origin(error, in_step)
        return True

    def of_missing(self, shards: Sequence[int]) -> Exception:
        """Return the error for shards without a loss."""
        return RuntimeError(
            f"`step.backward` must be called for every batch of `step.shards`, but shards "
            f"{shards} of step {self._number} have no loss: loop over all of `step.shards`."
        )

    def begin(self, shard: int, batch: Any) -> None:
        """Prepare to repeat a shard's passes."""
        self._is_begun = True
        self._engine.passes.repeat(shard)
        self._look, self._batch = FinitenessHooks(self._engine.model), batch

    def take(self, shard: int, returned: Any, num_samples: int, share: float) -> None:
        """Receive, instead of the engine, what the loss function returned in the second look."""
        total, weight = read_loss(returned, num_samples).numbers()["loss"]
        self._loss = total / weight if weight else total

    def close(self) -> None:
        """Remove the hooks."""
        if self._look is not None:
            self._look.close()

    def of_values(self, error: NonFiniteLossError) -> NonFiniteLossError:
        """Return what made a loss, or gradients, not finite. Collective."""
        self.close()
        cause = Cause(parameters=error.parameters)
        with suppress(Exception):  # the first error counts
            if self._look is not None and error.shard is not None:
                cause = self._of_loss(self._look.output, error.shard)
        self._engine.guard.clear_gradients()
        self._engine.exchange.buffers.restore()
        with suppress(UnisonoError):  # a worker was lost; the step fails in any case
            told = json.dumps(cause).encode()
            heard = self._run.team.gather(told, "what is not finite").values()
            order = named_parameters(self._engine.model, self._run.kept.optimizer)
            return explained(error, [Cause(*json.loads(each)) for each in heard], order)
        return error

    def _of_loss(self, first: BadOutput | None, shard: int) -> Cause:
        if names := _bad_tensors(self._engine.model):
            return _in_parameters(names)
        if math.isfinite(self._loss):
            return Cause(
                f"computed once more, from the same samples and random numbers, it is "
                f"{self._loss:g}",
                "look for values that the loss function keeps or that depend on the rank, or for "
                "a device that computes wrong.",
            )
        bad = _bad_samples(self._batch, self._indices(shard))
        words = f"{samples_in_words(bad)} {'has' if len(bad) == 1 else 'have'}" if bad else ""
        if first is not None:
            return _in_a_module(first, words)
        also = f", and {words} values that are not finite" if words else ""
        what = f"the output of every module is finite, so the loss function makes it{also}"
        return Cause(what, f"{_LOOK_THERE}.")


def failing_shard(engine: StepEngine) -> int | None:
    """Return the first shard whose non-finite loss makes a step fail, once all are computed."""
    bad, scaling = engine.records.bad, engine.passes.scaling
    can_shrink = scaling is not None and scaling.scale > SMALLEST
    return None if bad is None or can_shrink else bad[0]


def explained(
    error: NonFiniteLossError, causes: Sequence[Cause], order: Iterable[str]
) -> NonFiniteLossError:
    """Return an error with the cause of this one, as far as any worker knows it."""
    named = dict.fromkeys(name for cause in causes for name in cause.parameters)
    names = [name for name in order if name in named]
    names += [name for name in named if name not in names]
    cause = next((cause for cause in causes if cause.what), _of_gradients(names))
    if not cause.what:
        return error
    said, parameters, rest = text_of(error).partition(_PARAMETERS)
    kept, _, remedy = rest.partition(": ")
    return NonFiniteLossError(
        f"{said}: {cause.what}{parameters}{kept}: {cause.remedy or remedy}",
        step=error.step,
        shard=error.shard,
        value=error.value,
        module=cause.module,
        file=cause.file,
        line=cause.line,
        parameters=tuple(names),
    )


def _bad_tensors(model: nn.Module) -> list[str]:
    """Return the names of parameters that are not finite, and of buffers with NaN or +inf."""
    parameters = [n for n, p in model.named_parameters() if values_of(p) != Finiteness.FINITE]
    return parameters + [n for n, b in model.named_buffers() if values_of(b) == Finiteness.BAD]


def _bad_samples(batch: Any, samples: Sequence[int]) -> list[int]:
    """Return the dataset indices of a batch's samples with values that are not finite."""
    rows: set[int] = set()
    for leaf in tree_leaves(batch):
        if values_of(leaf) == Finiteness.BAD and leaf.ndim and len(leaf) == len(samples):
            bad = ~torch.isfinite(leaf.detach()).reshape(len(leaf), -1).all(1)
            rows |= set(bad.nonzero().flatten().tolist())
    return [samples[row] for row in sorted(rows)]


def _in_parameters(names: Sequence[str]) -> Cause:
    are, more = "is", len(names) - 1
    if more:
        are = f"and {more} more parameter{'s or buffers' if more > 1 else ' or buffer'} are"
    return Cause(
        f"`{names[0]}` {are} not finite as the step begins",
        "if an earlier update caused this, pass `clip_norm=math.inf`, which checks the gradients "
        "before every update, and continue from an earlier checkpoint; lower the learning rate.",
        names,
    )


def _in_a_module(first: BadOutput, samples: str) -> Cause:
    place, given = first.place, "is finite"
    remedy = f"{_LOOK_THERE} or an overflow, or lower the learning rate."
    if first.given == Finiteness.BAD:
        given = "is not finite already" + (f", as {samples} such values" if samples else "")
        remedy = "look at that data." if samples else f"look at what computes it: {_LOOK_THERE}."
    elif first.given == Finiteness.MASK:
        given = "is finite but for −inf, as in masks"
        remedy = f"look for a row that is masked as a whole, or {remedy.removeprefix('look ')}"
    what = f"the first output that is not finite is that of {place}, whose input {given}"
    return Cause(what, remedy, (), place.module, place.file, place.line)


def _of_gradients(names: Sequence[str]) -> Cause:
    if len(names) < 2:
        return Cause(f"the gradient of `{names[0]}` is not" if names else "")
    return Cause(
        f"the gradients of {len(names)} parameters are not, and `{names[-1]}` is the last of them "
        f"in the model",
        f"look at what comes after `{names[-1]}` in the model's forward pass for a division by "
        f"zero or the square root of zero (`torch.autograd.set_detect_anomaly(True)` shows the "
        f"line that leads to NaN), or lower the learning rate.",
    )


_REFUSED = re.compile(r"(\S+) does not have a deterministic implementation")


def is_refusal(error: BaseException) -> bool:
    """Return whether torch refused an operation that has no deterministic kernel."""
    if not isinstance(error, RuntimeError) or isinstance(error, NondeterministicError):
        return False
    return _REFUSED.search(text_of(error)) is not None or WORKSPACE_VARIABLE in text_of(error)


@contextmanager
def refusals_explained(model: nn.Module, is_needed: bool) -> Iterator[None]:
    """Raise :class:`NondeterministicError` if torch refuses a forward pass within a block."""
    try:
        yield
    except RuntimeError as error:
        if not (is_needed and is_refusal(error)):
            raise
        raise refused(error, model) from error


def refused(
    error: BaseException, model: nn.Module, *, is_backward: bool = False
) -> NondeterministicError:
    """Return the error for an operation that torch refused; backward passes have no frames."""
    names = {id(module): name for name, module in model.named_modules()}
    frames = list(walk_tb(error.__traceback__))
    place = innermost([(frame.f_code.co_filename, line) for frame, line in frames])
    for frame, _ in reversed(frames):
        module = frame.f_locals.get("self")
        if id(module) in names:
            place = place._replace(module=names[id(module)], kind=type(module).__name__)
            break
    where = str(place)
    if is_backward:
        where = "the backward pass (`torch.autograd.set_detect_anomaly(True)` shows of which line)"
        place = CallSite()
    refused = _REFUSED.search(text_of(error))
    if refused is None:
        return NondeterministicError(
            f"`{WORKSPACE_VARIABLE}` must be `:4096:8` or `:16:8`, or products of matrices have no "
            f"deterministic form, but is {os.environ.get(WORKSPACE_VARIABLE)!r}: set it before "
            f"the program starts, or leave it unset."
        )
    operation = shown(refused[1])
    return NondeterministicError(
        f"every operation must have a deterministic form on this device, but `{operation}` has "
        f"none: it is called in {where}. Compute it by other operations, or pass "
        f"`precision=Precision(exact=False)`, to a `Run` `exact=False`, which allows it; results "
        f"may then differ from one run to the next.",
        operation=operation,
        module=place.module,
        file=place.file,
        line=place.line,
    )
