"""What passes must not depend on, in words: errors, and what to write instead."""

from __future__ import annotations

from unisono.programs.rehearsal import Dependence

OF_TORCHMETRICS = "._update_count"
"""The end of the path to a counter that every object of torchmetrics has."""

_MUST = "the loss function and the model must depend on the shard alone, but"
_IN_TIME = (
    "take the step from `unisono.progress()`, set a value in `on_step_begin`, return metrics in a "
    "dict, or keep a buffer of the model (`register_buffer`)."
)
_OF_SAMPLES = (
    'return values of each sample as `"per_sample"` and change it in `on_step_end`, with those of '
    "the whole batch."
)
_OF_TENSORS = (
    f"keep a buffer of the model (`register_buffer`), return metrics in a dict, or {_OF_SAMPLES}"
)
_OF_METRICS = (
    "return means in a dict, and give functions of all rows, or objects of torchmetrics, to "
    "`fit(validate_metrics=…)` and `evaluate(metrics=…)`."
)

IMPORTED_LINE = (
    "`{}` was first imported after the loop began, so whether passes keep something in it is not "
    "found: import it before"
)
OF_BODY_LINE = (
    "`{}` covers only the shards that this worker computed in the loop over `step.shards`, while "
    "others compute other shards: take means over the whole batch from `step.loss` and `step.means`"
)
OF_PASSES_LINE = (
    "`{}` covers only the shards that this worker computes, while others compute other shards: "
    "return such values in the loss's dict, for means and sums over the whole batch, or as "
    '`"per_sample"`, or keep a buffer of the model'
)


def refusal(finding: Dependence, *, trains: bool, is_body: bool) -> RuntimeError:
    """Return an error for what a pass depends on.

    `trains`: whether the passes train; `is_body`: whether they are those of a custom loop.
    """
    if finding.is_of_rank:
        return RuntimeError(
            f"{_MUST} {finding.differs} changes when RANK and WORLD_SIZE are those of another "
            f"worker: compute the same on every worker; for what only one worker should "
            f"do, write a callback that checks `fit.is_leader`."
        )
    if finding.path:
        remedy = _IN_TIME if finding.is_plain else _OF_TENSORS
        if not trains or finding.path.endswith(OF_TORCHMETRICS):
            remedy = _OF_METRICS
        return RuntimeError(
            f"`{finding.path}` carries over from one shard to the next, and {finding.differs} "
            f"depends on it, but each worker computes different shards: {remedy}"
        )
    if is_body:
        return RuntimeError(
            f"{finding.differs} differs when a step's first batch is repeated after the last "
            f"one: the body of the loop over `step.shards` keeps state from shard to shard, "
            f"or counts this worker's shards, as `enumerate(step.shards)` does: use "
            f"`unisono.progress().shard` instead, and update the state between steps."
        )
    return RuntimeError(
        f"{_MUST} computed twice, from the same samples, random numbers, parameters and "
        f"buffers, {finding.differs} differs: look for state that they keep from shard to "
        f"shard, reads of the clock, and generators that cannot be found; {_IN_TIME}"
    )


def reads_stored(path: str, differs: str) -> RuntimeError:
    """Return an error for `on_gradients` that depends on what passes stored."""
    return RuntimeError(
        f"`on_gradients` reads `{path}`, which the loss or the model stores, so {differs} would "
        f"depend on which shards a worker computes: use the gradients alone, or keep a mean of the "
        f"whole batch from `step.means` in `on_step_end`, for the next step."
    )


def reads_sum(path: str, differs: str) -> RuntimeError:
    """Return an error for a pass without training that depends on what others have added up."""
    return RuntimeError(
        f"{_MUST} passes in training add to `{path}`, each worker its own shards, and {differs} of "
        f"a pass without training depends on that: keep a buffer of the model (`register_buffer`) "
        f"instead."
    )


def changes_samples(path: str) -> RuntimeError:
    """Return an error for passes that change what the dataset reads."""
    return RuntimeError(
        f"{_MUST} they change `{path}`, which the dataset reads, and each worker computes other "
        f"shards: {_OF_SAMPLES}"
    )


def changes_batch() -> RuntimeError:
    """Return an error for passes that change the memory of samples."""
    return RuntimeError(
        f"{_MUST} they change their batch in place, and with it the dataset, as `collate_fn` or "
        f"`__getitem__` returns its own memory: clone the tensors there, or write `x = x - mean` "
        f"instead of `x -= mean`."
    )
