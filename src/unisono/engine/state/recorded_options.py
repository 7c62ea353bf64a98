"""The options that the program gave when its run began, with which a resumed run continues.

A checkpoint contains the options of the optimizer's groups and the state of schedules, and loading
it would overwrite options that the program has changed since. Only changes by the program count:
options are recorded when a run first begins and compared with those at the next start, at the same
place in the program, so that the progress of a schedule is no change.
"""

from __future__ import annotations

import copy
import json
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, final

from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ChainedScheduler, LRScheduler, ReduceLROnPlateau

from unisono.engine.state.contents import named_parameters
from unisono.engine.state.optimizer_state import group_options
from unisono.engine.state.packing import unpack_number
from unisono.engine.state.saved import apply_groups, modes_of
from unisono.errors import CheckpointError

_RATE, _FIRST_RATE = "lr", "initial_lr"
# What follows from rates, or says how far a schedule has come.
_PROGRESS = ("base_lrs", "last_epoch", "best", "num_bad_epochs", "cooldown_counter")
_OF_SCHEDULES = {
    *(_RATE, _FIRST_RATE, "min_lr", "max_lr"),
    *("momentum", "betas", "base_momentum", "max_momentum"),
}


@dataclass(frozen=True, slots=True)
class Change:
    """One option that the program gives a different value than when its run began."""

    kind: str  # `"group"`, `"schedule"` or `"parameter"`
    where: Any  # the group's position, the schedule's key in `run.state`, the parameter's name
    option: str  # its name
    old: Any  # its value then, as plain JSON
    new: Any  # its value now, as plain JSON


@final
class RecordedOptions:
    """What a program gave when its run first began.

    If `takes_programs`, the program's changes override a checkpoint. `first` is plain JSON; empty
    before the first loop, and if an option is not a plain value.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        state: Mapping[str, Any],
        *,
        takes_programs: bool,
    ) -> None:
        self._model, self._optimizer, self._state = model, optimizer, state
        self._takes_programs = takes_programs
        self._is_recorded = False
        self._now: dict[str, Any] = {}
        self._schedules: dict[str, Any] = {}
        self.first: dict[str, Any] = {}

    def record(self) -> None:
        """Record once what the program gives, before a checkpoint is loaded."""
        if not self._is_recorded:
            self._is_recorded, self._now = True, self._current()
            self._schedules = {
                key: copy.deepcopy(schedule.state_dict())
                for key, schedule in _schedules(self._state).items()
            }
            self.first = self._now

    def describe_changes(self, first: Mapping[str, Any]) -> list[str]:
        """Return at most one line: the changed options, and which values are used."""
        changes = _in_words(_changes(first, self._now), self._optimizer)
        if not changes:
            return []
        if self._takes_programs:
            told = "; ".join(f"{what}: {new}, was {old}" for what, old, new in changes)
            return [f"taking options from the program, as `Checkpoint` says: {told}"]
        told = "; ".join(f"{what}: {new} given, {old} kept" for what, old, new in changes)
        return [
            f"the run continues with the options that it began with: {told}. Pass "
            f'`Checkpoint(options="program")` to take what the program gives, or train '
            f'another run with another `directory` or `Checkpoint(resume="never")`.'
        ]

    def apply(self, first: dict[str, Any]) -> None:
        """Apply the options of the run, after a checkpoint was loaded."""
        self.first = first
        if self._takes_programs:
            self.first = self._now
            self._apply(_changes(first, self._now))

    def _current(self) -> dict[str, Any]:
        try:
            told = {
                "groups": group_options(self._optimizer),
                "schedules": {
                    key: dict(_scalars(schedule.state_dict()))
                    for key, schedule in _schedules(self._state).items()
                },
                "fixed": modes_of(self._model, self._optimizer)["fixed"],
            }
            plain: dict[str, Any] = json.loads(json.dumps(told))
        except (CheckpointError, TypeError, ValueError):
            return {}
        return plain

    def _apply(self, changes: list[Change]) -> None:
        optimizer = self._optimizer
        named = named_parameters(self._model, optimizer)
        groups: list[dict[str, Any]] = [{} for _ in optimizer.param_groups]
        for change in changes:
            if change.kind == "group":
                groups[change.where][change.option] = change.new
            elif change.kind == "parameter":
                named[change.where].requires_grad_(change.new)
        before = group_options(optimizer)
        apply_groups(groups, optimizer)
        replayed = {}
        for key, schedule in _schedules(self._state).items():
            own = {c.option: c.new for c in changes if (c.kind, c.where) == ("schedule", key)}
            if not isinstance(schedule, ReduceLROnPlateau):
                replayed[key] = schedule
            elif own:
                schedule.load_state_dict({**schedule.state_dict(), **own})
        if not replayed:
            if _schedules(self._state):
                self._scale_rates(changes, before)
        elif any(c.kind == "schedule" or c.option in _OF_SCHEDULES for c in changes):
            self._replay(replayed)

    def _scale_rates(self, changes: list[Change], before: list[dict[str, Any]]) -> None:
        """Change rates in proportion to the change of the rates that the run began with."""
        for change in changes:
            if (change.kind, change.option) == ("group", _RATE) and change.old:
                rate = before[change.where][_RATE] * (change.new / change.old)
                values: list[dict[str, Any]] = [{} for _ in before]
                values[change.where][_RATE] = rate
                apply_groups(values, self._optimizer)

    def _replay(self, schedules: Mapping[str, LRScheduler]) -> None:
        """Repeat the steps of schedules, starting from the program's present options."""
        optimizer, fresh = self._optimizer, self._now["groups"]
        kept = group_options(optimizer)
        counts = {key: steps_done(schedule) for key, schedule in schedules.items()}
        apply_groups(fresh, optimizer)
        for key, schedule in schedules.items():
            schedule.load_state_dict(copy.deepcopy(self._schedules[key]))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of steps without the optimizer's
            for _ in range(max(counts.values())):
                for key, schedule in schedules.items():
                    if steps_done(schedule) < counts[key]:
                        schedule.step()
        found = group_options(optimizer)
        moved = [
            {
                name: value
                for name, value in there.items()
                if name in (_RATE, _FIRST_RATE) or value != begun.get(name)
            }
            for there, begun in zip(found, fresh, strict=True)
        ]
        apply_groups([{**old, **new} for old, new in zip(kept, moved, strict=True)], optimizer)


def steps_done(schedule: LRScheduler) -> int:
    """Return how often a schedule was stepped; a chain's own first schedule counts for it."""
    if isinstance(schedule, ChainedScheduler):
        return steps_done(schedule._schedulers[0])
    return int(getattr(schedule, "last_epoch", 0))


def _schedules(state: Mapping[str, Any]) -> dict[str, LRScheduler]:
    return {key: value for key, value in state.items() if isinstance(value, LRScheduler)}


def _scalars(state: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in state.items():
        path = f"{before}{name}"
        if name == "_schedulers" and isinstance(value, (list, tuple)):
            for number, inner in enumerate(value):
                yield from _scalars(inner, f"{path}[{number}].")
        elif _is_plain(value) and (
            name == "_milestones" or not (str(name).startswith("_") or name in _PROGRESS)
        ):
            yield path, value


def _is_plain(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return all(map(_is_plain, value))
    if isinstance(value, Mapping):  # milestones of MultiStepLR
        return all(map(_is_plain, [*value.keys(), *value.values()]))
    return value is None or isinstance(value, (bool, int, float, str))


def _changes(first: Mapping[str, Any], now: Mapping[str, Any]) -> list[Change]:
    """Compare options; `first` comes from a file, so its form is checked."""
    if not now:
        return []
    changes: list[Change] = []
    groups, schedules, fixed = (first.get(name) for name in ("groups", "schedules", "fixed"))
    if isinstance(groups, list) and len(groups) == len(now["groups"]):
        for at, (old, new) in enumerate(zip(groups, now["groups"], strict=True)):
            changes += _differing("group", at, old, new)
    for key, new in now["schedules"].items():
        old = schedules.get(key) if isinstance(schedules, Mapping) else None
        changes += _differing("schedule", key, old, new)
    if isinstance(fixed, list) and all(isinstance(name, str) for name in fixed):
        for name in sorted({*fixed} ^ {*now["fixed"]}):
            is_fixed = name in now["fixed"]
            changes.append(Change("parameter", name, "requires_grad", is_fixed, not is_fixed))
    return changes


def _differing(kind: str, where: Any, old: Any, new: Mapping[str, Any]) -> list[Change]:
    before = old if isinstance(old, Mapping) else {}
    return [
        Change(kind, where, name, before[name], value)
        for name, value in new.items()
        if name in before and before[name] != value
    ]


def _in_words(changes: list[Change], optimizer: Optimizer) -> list[tuple[str, str, str]]:
    """Return each change once: what has changed, its old value, its new value."""
    scheduled = {change.where for change in changes if change.option == _FIRST_RATE}
    told: dict[tuple[str, str, str, str], list[Any]] = {}
    for one in changes:
        if one.option == _RATE and one.where in scheduled:
            continue  # what a schedule has made of the one that was given
        option = _RATE if one.option == _FIRST_RATE else one.option
        old, new = (repr(unpack_number(value)) for value in (one.old, one.new))
        told.setdefault((one.kind, option, old, new), []).append(one.where)
    return [
        (_place(kind, option, places, optimizer), old, new)
        for (kind, option, old, new), places in told.items()
    ]


def _place(kind: str, option: str, places: list[Any], optimizer: Optimizer) -> str:
    if kind == "schedule":
        return ", ".join(f"{option} of `{key}`" for key in places)
    if kind == "parameter":
        more = f" and {len(places) - 1} more" if len(places) > 1 else ""
        return f"{option} of `{places[0]}`{more}"
    if len(places) == len(optimizer.param_groups):
        return option
    names = [str(optimizer.param_groups[at].get("name", at)) for at in places]
    return f"{option} of group {' and '.join(names)}"
