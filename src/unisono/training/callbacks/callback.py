"""The interface of callbacks: what may observe a run, and when.

::

    on_begin ─► ┌ on_step_begin ─ step ─ on_step_end ─ on_validation ─ on_epoch_end ┐ ─► on_end
                └ on_workers_changed, on_went_back, on_snapshot, on_checkpoint ◄────┘
                                anything raised ─► on_error

Every method runs on every worker, at the same points of the run. Means, norms and steps are equal
on all workers, so each can derive the same decision from them. Guard anything that should happen
once, such as writing a file, with ``fit.is_leader``; the leader changes when it is lost.
"""

from __future__ import annotations

import os
import weakref
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from inspect import signature
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, final

from unisono.errors import CallbackError, UnisonoError
from unisono.runtime.notices import text_of
from unisono.runtime.world import per_process
from unisono.training.callbacks.summary import Summary

if TYPE_CHECKING:  # a logger's process does not need torch
    import torch
    from torch import nn
    from torch.optim import Optimizer


class Times(NamedTuple):
    """How one worker spent one step, in seconds; `begun_s` is a time of ``perf_counter``."""

    begun_s: float
    loading_s: float
    forward_s: float
    backward_s: float
    waiting_s: float
    summing_s: float
    updating_s: float


class DoneStep(ABC):
    """A finished step, as callbacks see it.

    Attributes:
        number: counted from 0 over the whole run.
        epoch: counted from 0.
        batch: position of the global batch in the epoch, counted from 0.
        num_samples: samples in the global batch, over all workers.
        means: the loss and other scalars by name, each the exact mean over the global batch, the
            same on every worker.
        per_sample: what the loss function returned as ``"per_sample"``, by name: a tensor on the
            host with one row per sample of the global batch, in order, the same on every worker.
        gradient_norm: with ``clip_norm=``: the norm of the mean gradients before clipping;
            infinite if the step is skipped.
        is_skipped: with a scaled loss: whether the step left parameters unchanged because
            gradients were not finite. The step still counts.
    """

    number: int
    epoch: int
    batch: int
    num_samples: int
    means: Mapping[str, float]
    per_sample: Mapping[str, torch.Tensor]
    gradient_norm: float | None
    is_skipped: bool

    @property
    @abstractmethod
    def indices(self) -> list[int]:
        """The dataset indices of the samples in the global batch, in order."""


@DoneStep.register
class KeptStep(NamedTuple):
    """The results of a step that the program has stored, where another process has them."""

    number: int
    epoch: int
    batch: int
    num_samples: int
    means: Mapping[str, float]
    per_sample: Mapping[str, Any]
    gradient_norm: float | None
    is_skipped: bool
    is_done: bool
    indices: list[int]

    @property
    def loss(self) -> float:
        """The mean loss over the global batch."""
        return self.means["loss"]


class Fit(Protocol):
    """A running call of ``fit``, as callbacks see it."""

    @property
    def model(self) -> nn.Module:
        """The model being trained. Do not change it."""

    @property
    def validated_model(self) -> nn.Module:
        """The model to validate: `model`, or what ``fit(validate_model=…)`` returns now."""

    @property
    def optimizer(self) -> Optimizer:
        """The optimizer that updates the model. Do not change it."""

    @property
    def directory(self) -> Path | None:
        """The run directory, or None."""

    @property
    def step(self) -> int:
        """Number of steps done over the whole run."""

    @property
    def epoch(self) -> int:
        """Number of epochs done."""

    @property
    def end_step(self) -> int:
        """Number of steps that the run will have done when this call ends."""

    @property
    def has_ended(self) -> bool:
        """Whether all steps are done, so that the state saved with the run is final."""

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks of the workers that compute together now, in ascending order."""

    @property
    def rank(self) -> int:
        """The rank of this worker."""

    @property
    def is_leader(self) -> bool:
        """Whether this worker writes for all; False if it repeats what others have done."""

    @property
    def is_first(self) -> bool:
        """Whether this worker has the lowest rank, and so draws on the terminal."""

    @property
    def has_joined(self) -> bool:
        """Whether this worker joined later than the others, as a replacement."""

    @property
    def facts(self) -> Mapping[str, Any]:
        """Identity, versions, machine, command and sizes of the run, as JSON values."""

    def pid(self, rank: int) -> int | None:
        """Return the process ID of a worker, or None if unknown, as on another host."""

    def times(self, rank: int, step: int) -> Times | None:
        """Return a worker's times in one of the last two steps; None if it did not finish.

        Those of another worker are complete once all have synchronized, as in the next step.
        """

    def memory(self, rank: int) -> int | None:
        """Return the bytes of device memory that a worker's tensors last used; None on CPUs.

        Workers measure when a call begins, and after a step at most ten times a second.
        """

    def say(self, line: str) -> None:
        """Print one line for the user without disturbing the progress bar.

        Call it with the same line on every worker: the one for which ``is_first`` holds shows
        the line, and that need not be the leader.
        """

    def once(self, work: Callable[[], str], purpose: str) -> str:
        """Run `work` on the leader; if the leader is lost meanwhile, the next one runs it.

        Collective: every rank calls it, at the same moment.

        Args:
            work: does the job and returns a description of the result; it must not raise.
            purpose: what the job is, in at most 24 letters.

        Returns:
            What `work` returned, on every worker, once it is done.
        """

    def written_checkpoint(self) -> Path | None:
        """Wait until the leader's newest checkpoint is written, and return its folder.

        None if there is none, if it was not written, or if the launcher is still writing it.
        """

    def check_directory(self) -> str:
        """Check, before anything is written there, that the run directory is still the run's.

        If the directory was removed or replaced during the run, the one that now has its name is
        locked for this run, so that no other job uses it. Any worker may call this at any time.

        Returns:
            Why nothing may be written there; empty if all is well, or if there is no directory.
        """

    def stop(self, why: str) -> None:
        """End the run after the current step. Collective: every rank calls it, at the same step.

        The run stays ended, also after a restart, for every `fit` with a callback of this name.
        """


class Callback:
    """Observes a run: override the methods you need; the others do nothing.

    Anything your own callback changes is saved with the run: plain values, tensors, arrays and
    modules, also in lists, tuples, sets and dicts, in its attributes and those of your own objects,
    and in closures, globals and datasets that its code refers to (up to 1 MiB each). Changes since
    the first ``fit`` began are part of checkpoints, are passed to replacements, and are undone if
    the run goes back. Values that differ between ranks after `on_begin` are saved for each rank.

    A callback with ``state_dict`` and ``load_state_dict`` is saved by these alone, under its name.
    It should also define ``forget``.

    Attributes:
        needs_validation: whether ``fit`` must be called with ``validate=``.
        monitor: the validation mean that it watches; empty: none in particular.
        may_fail: whether training continues if a method raises: the failure is reported, and the
            callback is not called again in this ``fit``. Only for those that write or display.
    """

    needs_validation = False
    monitor = ""
    may_fail = False

    @property
    def name(self) -> str:
        """The name in messages and checkpoints."""
        return type(self).__name__

    def writes_to(self, directory: Path | None) -> Path | None:
        """Return the file or folder that only this callback writes, or None.

        Args:
            directory: the run directory, or None.
        """
        return None

    def forget(self) -> None:
        """Reset to the initial state, because another run begins, which may then load its own.

        Called only on a callback with ``state_dict``, when ``fit`` begins, and not if the call
        continues the run of the previous call.
        """

    def before_resume(self, directory: Path) -> None:
        """Called before ``fit`` looks for checkpoints in the run directory; you may add one."""

    def on_begin(self, fit: Fit) -> None:
        """Called before the first step of a call of ``fit``, unless there is nothing to do.

        The run is at the step from which it continues. On a replacement, this is called once it
        has joined the others, or, if they have finished all steps without it, when it finds that
        out (``fit.has_ended``). A resumed run calls this, then `on_end`, on the program's own
        callbacks for each call of ``fit`` that had ended before.
        """

    def on_step_begin(self, fit: Fit) -> None:
        """Called before each step."""

    def on_step_end(self, fit: Fit, step: DoneStep) -> None:
        """Called after each step, even a repeated one: once updated, before the schedule steps."""

    def on_validation(self, fit: Fit, means: Mapping[str, Any], seconds: float) -> None:
        """Called after each validation; all workers have the same means.

        The last call may come when ``fit.has_ended``. A run with other totals would not have it,
        so nothing that is saved with the run should depend on it.
        """

    def on_epoch_end(self, fit: Fit) -> None:
        """Called after an epoch's last step, validation and schedule step."""

    def on_snapshot(self, fit: Fit) -> None:
        """Called before the run's state is copied in memory, many times a minute.

        If all workers are lost, their replacements continue from here or later. Whatever a
        callback buffers and nobody could recompute must be in its file now.
        """

    def on_checkpoint(self, fit: Fit, step: int) -> None:
        """Called after a checkpoint at `step` was requested; not on a worker that joins there."""

    def on_workers_changed(self, fit: Fit, before: Sequence[int], why: str) -> None:
        """Called after the computing workers changed from `before` to ``fit.ranks``.

        `why` is the reason, in words. `before` is empty on a replacement that continues alone
        because all workers were lost.
        """

    def on_went_back(self, fit: Fit, from_step: int) -> None:
        """Called after the run went back from `from_step`; its saved state is already restored."""

    def on_end(self, fit: Fit, summary: Summary) -> None:
        """Called after ``fit`` has finished, with all validations and checkpoints."""

    def on_error(self, fit: Fit, error: BaseException) -> None:
        """Called after an exception in ``fit`` on this worker, before it leaves ``fit``.

        Also called if a run with a directory is interrupted and its launcher ends this process:
        with a KeyboardInterrupt after Ctrl-C, otherwise with a SystemExit.
        """


# Callbacks that other libraries accept by name.
_NAMES = ("BestCheckpoint", "EMA", "EarlyStopping", "MLflow", "TensorBoard", "WandB")
_OTHERWISE = "derive from it, or pass an instance"


class _RunOfFile(weakref.WeakValueDictionary[str, Any]):
    """Which run of this process has begun or continued a file last."""


@final
class Callbacks:
    """Calls callbacks one after another; `calling` is the one that runs now.

    Exceptions name the callback that raised them. Two that write the same file are refused.
    """

    def __init__(self, callbacks: Sequence[Any], directory: Path | None = None) -> None:
        for callback in callbacks:
            if not isinstance(callback, Callback):
                hint = ", not the class" if isinstance(callback, type) else ""
                known = [one for one in _NAMES if str(callback).lower() == one.lower()]
                remedy = f"pass `unisono.callbacks.{known[0]}()`" if known else _OTHERWISE
                raise TypeError(
                    f"`callbacks` must be a list of `unisono.callbacks.Callback`{hint}, but has "
                    f"{callback!r}: {remedy}."
                )
        self._callbacks: list[Callback] = list(callbacks)
        self._failed: list[Callback] = []
        self._at = 0  # index of the callback called last
        self.calling: Callback | None = None
        writers, self._outside = dict[str, str](), dict[str, str]()
        for callback in self._callbacks:
            if (path := callback.writes_to(directory)) is None:
                continue
            place = os.path.realpath(path)
            if place in writers:
                raise ValueError(
                    f"each callback must write a separate file, but {writers[place]} and "
                    f"{callback.name} both write {path}: give one of them another `path`."
                )
            writers[place] = callback.name
            if directory is None or not path.is_relative_to(directory):
                self._outside[place] = callback.name

    def __iter__(self) -> Iterator[Callback]:
        return iter(self._callbacks)

    def take_files(self, run: object, *, has_begun: bool) -> None:
        """Record whose files are outside of the run's directory, which belongs to one run anyway.

        Raises ValueError if another run has begun in one of them since.
        """
        runs = per_process(_RunOfFile)
        for place, name in self._outside.items():
            if has_begun and runs.get(place, run) is not run:
                raise ValueError(
                    f"each run must write a separate file, but another one of this program has "
                    f"begun {place} since {name} of this one wrote it: give one of them another "
                    f"`path`."
                )
            runs[place] = run

    @property
    def names(self) -> list[str]:
        """The names of the callbacks; a repeated name gets a number."""
        seen: Counter[str] = Counter()
        names: list[str] = []
        for name in [callback.name for callback in self._callbacks]:
            seen[name] += 1
            names.append(name if seen[name] == 1 else f"{name} {seen[name]}")
        return names

    def forget_others(self, known: Mapping[str, Any]) -> None:
        """Reset callbacks with a state, except those in `known`, which the run continues with."""
        ids = set(map(id, known.values()))
        for callback in self._callbacks:
            if hasattr(callback, "state_dict") and id(callback) not in ids:
                callback.forget()

    def keep_states(self, state: dict[str, Any]) -> None:
        """Save the callbacks' states with the run, also those of callbacks added later."""
        for name, callback in zip(self.names, self._callbacks, strict=True):
            if not hasattr(callback, "state_dict") or state.get(name) is callback:
                continue
            # The run may have resumed without this callback.
            kept, state[name] = state.get(name), callback
            if isinstance(kept, Mapping):
                state[name].load_state_dict(kept)

    def call(self, moment: str, fit: Fit, *arguments: Any) -> None:
        """Call the method `moment` of all callbacks; raise CallbackError if one fails."""
        for at, callback in enumerate(self._callbacks):
            if callback in self._failed:
                continue
            self._at, self.calling = at, callback
            try:
                getattr(callback, moment)(fit, *arguments)
            except UnisonoError:
                raise
            except Exception as error:
                trouble = (
                    f"the callback {callback.name} failed in `{moment}`: "
                    f"{type(error).__name__}: {text_of(error)}"
                )
                if not callback.may_fail:
                    raise CallbackError(trouble) from error
                self._failed.append(callback)
                fit.say(f"{trouble}; training continues without it")
            finally:
                self.calling = None

    @property
    def failed(self) -> list[str]:
        """The names of the callbacks that have failed, and are not called any more."""
        named = zip(self.names, self._callbacks, strict=True)
        return [name for name, callback in named if callback in self._failed]

    def leave_out(self, names: Collection[str], again: Collection[Callback] = ()) -> None:
        """Call some callbacks no more, as they had failed before; call those of `again` again."""
        named = zip(self.names, self._callbacks, strict=True)
        self._failed = [one for one in self._failed if one not in again]
        self._failed += [one for name, one in named if name in names and one not in self._failed]

    def behind(self, moment: str) -> list[str]:
        """Return the names of callbacks after the last one called that override `moment`."""
        usual, rest = getattr(Callback, moment), self._callbacks[self._at + 1 :]
        return [each.name for each in rest if getattr(type(each), moment) is not usual]


def check_moments(callbacks: Iterable[Callback]) -> None:
    """Raise TypeError for methods that cannot be called, such as those of other libraries."""
    moments = [name for name in vars(Callback) if name.startswith("on_")]
    for callback in callbacks:
        unknown = [n for n in dir(type(callback)) if n.startswith("on_") and n not in moments]
        if unknown:
            raise TypeError(
                f"methods of callbacks that begin with `on_` must be moments, but "
                f"{callback.name} has `{unknown[0]}`, which is never called: write one of "
                f"{', '.join(moments)}, or give it another name."
            )
        for name in moments:
            usual, own = getattr(Callback, name), getattr(callback, name)
            if getattr(own, "__func__", None) is usual:
                continue  # a signature takes 20 µs
            wanted = [*signature(usual).parameters][1:]
            takes = signature(own)
            try:
                takes.bind(*wanted)
            except TypeError:
                raise TypeError(
                    f"`{callback.name}.{name}` must be a method of (self, {', '.join(wanted)}), "
                    f"but takes (self, {', '.join(takes.parameters)})."
                ) from None
