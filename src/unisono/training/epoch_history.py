"""A run's history: a row per epoch, kept in ``run.last``, so that it goes back with the run.

A row averages the sums and weights of its steps, never their means; they are added in the order of
steps, on every worker.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from unisono.engine.state.run_state import Position
from unisono.engine.step.records import StepMeans, mean_of
from unisono.runtime.notices import decimal

_ROWS, _SUMS, _FOUND = "history", "epoch_sums", "epoch_validation"
_SAMPLES = "samples_trained"
_ROWS_AT_MOST = 10_000  # because each snapshot contains them
VALIDATION = "validation/"


def note_step(
    last: dict[str, Any], means: StepMeans, num_samples: int, position: Position, weight_of: int = 1
) -> None:
    """Add a finished step, after which the run is at `position`.

    `weight_of`: the weight of each mean, where those of the step are all 1.
    """
    last[_SAMPLES] = samples_trained(last) + num_samples
    sums = last.setdefault(_SUMS, {})
    for name, (total, weight) in means.sums.items():
        before = sums.setdefault(name, [0.0, None if weight is None else 0.0])
        if weight is None or before[1] is None:
            before[0], before[1] = before[0] + total, None
        else:
            before[0], before[1] = before[0] + total * weight_of, before[1] + weight * weight_of
    if position.batch == 0:
        rows = [*last.get(_ROWS, []), _row(last, position.epoch, position.step)]
        last[_ROWS] = rows[-_ROWS_AT_MOST:]
        del last[_SUMS]
        last.pop(_FOUND, None)


def epoch_loss(last: Mapping[str, Any], position: Position) -> str:
    """Return the mean training loss of the epoch that ends here; empty within an epoch."""
    here = [row for row in last.get(_ROWS, [])[-1:] if row["step"] == position.step]
    return f"; training loss {decimal(here[0]['loss'])}" if here else ""


def samples_trained(last: Mapping[str, Any]) -> int:
    """Return the number of samples in the steps recorded so far."""
    return int(last.get(_SAMPLES, 0))


def note_validation(last: dict[str, Any], found: Mapping[str, Any], position: Position) -> None:
    """Add the result of a validation that was due."""
    if position.batch == 0:
        last[_ROWS][-1] |= _named(found)
    else:
        last[_FOUND] = dict(found)


def rows(last: dict[str, Any], position: Position) -> list[dict[str, Any]]:
    """Return all rows, including one for the current epoch if it has begun.

    A validation at the end of a call, if none was due, is in no row: a run that resumes in a later
    call does not know of it.
    """
    found = [dict(row) for row in last.get(_ROWS, [])]
    if position.batch and _SUMS in last:
        found.append(_row(last, position.epoch + 1, position.step))
    return found


def _row(last: dict[str, Any], epoch: int, step: int) -> dict[str, Any]:
    means = {name: mean_of(*pair) for name, pair in last[_SUMS].items()}
    own = {"epoch": epoch, "step": step}  # a program's scalar of that name is in `step.means`
    return {**own, **means, **_named(last.get(_FOUND, {})), **own}


def _named(found: Mapping[str, Any]) -> dict[str, Any]:
    return {f"{VALIDATION}{name}": value for name, value in found.items()}
