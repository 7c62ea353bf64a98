"""How do a shard's loss and buffers change with twice as many samples? Reported once.

**A loss that doubles is a sum**, but a scalar is taken for a mean: with six shards the steps would
be a sixth as large as those of a plain loop. A pair whose weight does not grow with its sum is not
the mean that it seems to be.

**A loss that does not add up** from its samples (a mean over tokens, a variance over the batch) is
another one on shards. As dropout, and BatchNorm, do not add up either, that is seen in evaluation
mode, and only where random numbers do not matter.

**A buffer that a forward pass changes** ends a step as its first shard leaves it, which is right
for what does not depend on the samples. What counts or averages samples would see the first shard's
alone; which of both it does shows which word of `buffers=` makes the plain loop's value of it.

In the first step of a `fit` (of many, the first eight and every eighth) each worker computes the
loss of half of its first shard, of the other half, of both, and of the first half twice in one
batch; all is put back. Where a batch cannot be divided so, as one of graphs, or of targets behind
each other, a few of its samples are read and collated again. Nothing is reported for a compiled
model; for a stream that cannot be divided, and for a loop of the program, only buffers are checked.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, NamedTuple, final

import numpy as np
import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.utils.parametrizations import _SpectralNorm

from unisono.engine.step.engine import StepEngine
from unisono.engine.step.loss import is_of_whole_batch, read_loss
from unisono.runtime.training_progress import now
from unisono.training.computing import is_compiled
from unisono.training.first_steps import OF_LABELS
from unisono.training.rehearsals import Rehearsals
from unisono.training.run_context import RunContext
from unisono.training.step import Step

_OF_SUM = (
    "the loss grows with the number of samples, as a sum does, but a scalar is taken for the mean "
    "over a shard's samples, so steps are as large as a shard's: return `(sum, weight)`, with the "
    "number of samples as the weight for their mean, or with the weight None for the sum over the "
    "global batch"
)
_OF_WEIGHT = (
    "the loss returns `(sum, weight)`, whose sum grows with the number of samples and whose "
    "weight, here {:.4g}, does not, so gradients depend on the number of shards: return as the "
    "weight how many samples or tokens are summed, or None for the sum over the global batch"
)
_OF_MEAN = (
    "the loss returns `(sum, weight)`, whose weight grows with the number of samples and whose "
    "sum does not, as if it were a mean already, which is divided by the weight: return the mean "
    "alone, or the sum with its weight"
)
_OF_PARTS = (
    "the loss of a shard does not add up from the losses of its samples, so it depends on how many "
    "shards there are: return `(sum, weight)` for a mean over tokens, boxes or class weights, and "
    "pass `unisono.WholeBatch(embed, loss)` for a function of all samples together"
)
_OF_BUFFERS = (
    "forward passes change `{}`{}, and a step keeps what the first of its shards leaves there: {}"
)
_WORDS = {
    "sum": 'as that adds up over samples, pass `buffers={{{!r}: "sum"}}` to have all shards count',
    "mean": 'as that averages over samples, pass `buffers={{{!r}: "mean"}}` (of a maximum or '
    'minimum, that) to have all shards count, but return rows of samples as `"per_sample"`',
    "": "to have all samples count, return integers in the loss's dict, whose sums are in "
    '`step.means`; or rows as `"per_sample"`; or compute it from the whole batch, by '
    "`unisono.WholeBatch` or `step.gather`; sums and means over samples are combined by "
    '`buffers={{{!r}: "sum"}}` or `"mean"`, and `"first"` silences this line',
}
_OF_COUNT = (
    "; if its steps become smaller as `{}` grows, keep the sum over samples instead, and divide "
    "where it is read"
)
_ENOUGH, _NOISE = 1.5, 0.01  # of twice as much; of what is the same
_ROUNDING = 0.001  # of the loss of a batch that is computed in parts
_READ_AT_MOST = 4  # samples, each in some batches


class PassResult(NamedTuple):
    """The result of one computation: the loss, its weight (None: a mean), changes of buffers."""

    loss: float
    weight: float | None
    changes: Mapping[str, torch.Tensor]


def loss_problem(once: PassResult, again: PassResult, twice: PassResult) -> str:
    """Return what is wrong with a loss; `again` drew different random numbers than `once`."""
    largest = max(abs(once.loss), abs(again.loss))
    grows = abs(twice.loss) > _ENOUGH * largest and once.loss * twice.loss > 0
    stays = 0 < abs(twice.loss) < largest / _ENOUGH * 2
    if once.weight is None or twice.weight is None:
        return _OF_SUM if grows else ""
    weight_grows = twice.weight > _ENOUGH * once.weight
    if grows and not weight_grows:
        return _OF_WEIGHT.format(once.weight)
    return _OF_MEAN if weight_grows and stays and not grows else ""


def parts_problem(once: PassResult, again: PassResult, other: PassResult, both: PassResult) -> str:
    """Describe a loss of `both` halves that is not made of those of `once` and the `other`.

    `again` drew other random numbers than `once`. What a weight is that does not add up is unknown.
    """
    together, is_known = both.loss, True
    if once.weight is None or other.weight is None:
        together *= 2
    else:
        is_known = once.weight + other.weight == both.weight
    largest = max(abs(once.loss), abs(other.loss), abs(together))
    differs = abs(once.loss + other.loss - together) > _ROUNDING * largest
    return _OF_PARTS if is_known and differs and once.loss == again.loss else ""


def kind_of_change(
    once: torch.Tensor, again: torch.Tensor, other: torch.Tensor | None, twice: torch.Tensor
) -> str | None:
    """Return how a buffer changes: "sum", "mean", "" for another way; None: not with the samples.

    `again` is the change by the same samples after `once`, `other` that by other samples.
    """
    if not once.any() and not twice.any():
        return None
    if _is_close(twice, 2 * once) and _is_close(again, once):
        return "sum"
    if not _is_close(twice, once):
        return ""
    if other is not None and _is_close(other, once):
        return None
    return "mean" if other is not None else ""


def _is_close(a: torch.Tensor, b: torch.Tensor) -> bool:
    largest = b.abs().max()
    return bool((a - b).abs().max() <= _NOISE * largest)


@final
class Growth:
    """Checks the first step of one `fit`; `is_open` if the step must be checked as a whole."""

    def __init__(self, run: RunContext) -> None:
        self._run, self._is_done, self.is_open = run, False, False

    def check(
        self, step: Step, batch: Any, loss: Callable[[nn.Module, Any], Any], rehearsals: Rehearsals
    ) -> None:
        """Check a shard whose passes are done, if it is the first, and report what was found."""
        run, engine = self._run, self._run.engine
        is_seen_before = self._is_done or not run.is_looked_at
        if is_seen_before or engine is None or run.shards == 1 or is_compiled(run.kept.model):
            return
        self._is_done = True
        shard, num_samples = step.newest

        def divided(choices: Sequence[list[int]]) -> list[Any]:
            return [chosen(batch, num_samples, rows) for rows in choices]

        ways = (num_samples, divided), (_READ_AT_MOST, partial(step.read_rows, shard))
        for at_most, take in ways:
            # Whether a batch can be divided, only its loss knows.
            with suppress(Exception), rehearsals.undone():
                self._check(shard, min(num_samples, at_most), take, loss, engine)
                return
            engine.passes.start(shard)
            engine.passes.leave_shards()
        self.is_open = True

    def check_step(self, step: Step) -> None:
        """Check what a step has changed if its batches could not be divided."""
        self.is_open = False
        report_loop(self._run, step)

    def _check(
        self,
        shard: int,
        num_samples: int,
        take: Callable[[Sequence[list[int]]], list[Any]],
        loss: Callable[[nn.Module, Any], Any],
        engine: StepEngine,
    ) -> None:
        half = max(1, num_samples // 2)
        first, second = [*range(half)], [*range(half, min(2 * half, num_samples))]

        def seen(batch: Any, num_samples: int = half, *, starts: bool = True) -> PassResult:
            if starts:
                engine.passes.start(shard)
            else:
                engine.passes.seed("growth")
                now().at = (*engine.passes.at, shard)
            buffers = engine.exchange.buffers.values()
            before = {name: one.detach().clone() for name, one in buffers.items()}
            with torch.no_grad():
                returned = loss(self._run.kept.model, batch)
            found = read_loss(returned, num_samples)
            buffers = engine.exchange.buffers.values()
            changes = {n: _as_number(buffers[n]) - _as_number(one) for n, one in before.items()}
            weight = found.numbers()["loss"][1] if found.is_sum else None
            value = 0.0 if is_of_whole_batch(returned) else float(found.tensor)
            return PassResult(value, weight, changes)

        batches = take([first, first, first + first, *[second] * bool(second)])
        once, again = seen(batches[0]), seen(batches[1], starts=False)
        twice = seen(batches[2], 2 * half)
        other = seen(batches[3]) if second else None
        line = loss_problem(once, again, twice)
        is_known = bool(line) or OF_LABELS in self._run.told
        if second and not is_known and self._run.kept.position.step == 0:
            with suppress(Exception), _in_evaluation(self._run.kept.model):
                batches = take([first, first, second, first + second])
                halves = seen(batches[0]), seen(batches[1], starts=False), seen(batches[2])
                line = parts_problem(*halves, seen(batches[3], 2 * half))
        engine.passes.start(shard)
        engine.passes.leave_shards()
        if line:
            self._run.say_once(line)
        found: dict[str, list[str]] = {}
        for name in names_to_report(self._run, once.changes):
            changes = (once.changes[name], again.changes[name])
            kind = kind_of_change(*changes, other and other.changes[name], twice.changes[name])
            if kind is not None:
                found.setdefault(kind, []).append(name)
        report_buffers(self._run, found)


@contextmanager
def _in_evaluation(model: nn.Module) -> Iterator[None]:
    """Set evaluation mode without calling `eval`, which a model may override."""
    modes = [(module, module.training) for module in model.modules()]
    for module, _ in modes:
        module.training = False
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode


def report_loop(run: RunContext, step: Step) -> None:
    """Report which buffers the first step of a custom loop has changed."""
    if run.engine is None or run.shards == 1 or step.is_gathered:
        return
    if names := names_to_report(run, run.engine.exchange.buffers.changed_names()):
        report_buffers(run, {"": names})


def report_buffers(run: RunContext, found: Mapping[str, list[str]]) -> None:
    """Report what to write for each kind of change."""
    for kind, names in found.items():
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        line = _OF_BUFFERS.format(names[0], more, _WORDS[kind].format(names[0]))
        if kind == "mean" and "sum" in found:
            line += _OF_COUNT.format(found["sum"][0])
        run.say_once(line)


def names_to_report(run: RunContext, names: Any) -> list[str]:
    """Return the names for which the program has chosen no way, except in torch's own norms.

    Spectral norms iterate in each pass, and once in a step is what they do without shards.
    """
    known = {
        f"{prefix}.{name}".lstrip(".")
        for prefix, module in run.kept.model.named_modules()
        if isinstance(module, (_NormBase, _SpectralNorm))
        for name in module._buffers
    }
    assert run.engine is not None
    return [name for name in names if name not in known and not run.engine.passes.has_way(name)]


def chosen(tree: Any, num_samples: int, rows: list[int]) -> Any:
    """Return a batch of some of a batch's samples; raise TypeError if it cannot be divided."""
    if isinstance(tree, (torch.Tensor, np.ndarray)) and tree.ndim and len(tree) == num_samples:
        return tree[rows]
    if isinstance(tree, Mapping):
        return {name: chosen(each, num_samples, rows) for name, each in tree.items()}
    if not isinstance(tree, (tuple, list)):
        raise TypeError(f"a {type(tree).__name__} has no rows")
    try:
        return type(tree)([chosen(each, num_samples, rows) for each in tree])
    except TypeError:
        if len(tree) != num_samples:
            raise
        return type(tree)([tree[row] for row in rows])


def _as_number(value: torch.Tensor) -> torch.Tensor:
    is_number = value.is_floating_point() or value.is_complex()
    return value.detach() if is_number else value.detach().to(torch.int64)
