"""What may look at a run under way, and when: the interface of callbacks.

::

    on_begin ─► ┌ on_step_begin ─ step ─ on_step_end ─ on_validation ─ on_epoch_end ┐ ─► on_end
                └ on_workers_changed, on_went_back, on_snapshot, on_checkpoint ◄────┘
                                anything raised ─► on_error

Every method runs on every worker, at the same places of the run, so a callback may decide something
for all from means, norms and steps, which are the same for all. What is to happen once (a file, a
line) happens where ``fit.is_leader``; who that is may change when a worker is lost.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, final

from unisono.errors import CallbackError, UnisonoError
from unisono.training.callbacks.summary import Summary

if TYPE_CHECKING:  # the process of a logger has no need of torch
    import torch
    from torch import nn
    from torch.optim import Optimizer


class Times(NamedTuple):
    """Where one worker spent one step, in seconds; `begun_s` on the clock of ``perf_counter``."""

    begun_s: float
    loading_s: float
    forward_s: float
    backward_s: float
    waiting_s: float
    summing_s: float
    updating_s: float


class DoneStep(ABC):
    """A step that is done, as callbacks see it.

    Attributes:
        number: counted from 0 over the whole run.
        epoch: counted from 0.
        batch: which global batch of the epoch, counted from 0.
        num_samples: of the global batch, on all workers together.
        means: the loss and other scalars by name, each the exact mean over the global batch, the
            same on every worker.
        per_sample: what the loss function has returned as ``"per_sample"``, by name: a tensor with
            a row for each sample of the global batch, in its order, the same on every worker; on
            the host.
        gradient_norm: with ``clip_norm=``: of the mean gradients before they were clipped; infinite
            where the step is skipped.
        is_skipped: with a scaled loss: whether gradients were not finite, so that parameters have
            stayed as they were. The step counts all the same.
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
        """The samples of the global batch, by their numbers in the dataset, in its order."""


class Fit(Protocol):
    """The call of ``fit`` under way, as callbacks see it."""

    @property
    def model(self) -> nn.Module:
        """What is trained; to be read, not changed."""

    @property
    def validated_model(self) -> nn.Module:
        """What is validated: `model`, or what ``fit(validate_model=…)`` makes of it now."""

    @property
    def optimizer(self) -> Optimizer:
        """What updates it; to be read, not changed."""

    @property
    def directory(self) -> Path | None:
        """The run directory; None: there is none."""

    @property
    def step(self) -> int:
        """Steps done, over the whole run."""

    @property
    def epoch(self) -> int:
        """Epochs done."""

    @property
    def end_step(self) -> int:
        """The steps that the run will have done when this call ends."""

    @property
    def has_ended(self) -> bool:
        """Whether all steps are done; what is kept with the run is what it will be."""

    @property
    def ranks(self) -> tuple[int, ...]:
        """Of those who compute together now, ascending."""

    @property
    def rank(self) -> int:
        """Of this worker."""

    @property
    def is_leader(self) -> bool:
        """Whether this worker is the one that writes for all.

        Nobody is who finds that the others have already done what it comes to.
        """

    @property
    def is_first(self) -> bool:
        """Whether no worker that is there has a lower rank; that one draws on the terminal."""

    @property
    def has_joined(self) -> bool:
        """Whether this worker came later than the others, in the place of one that was lost."""

    @property
    def facts(self) -> Mapping[str, Any]:
        """What the run is, as JSON: identity, versions, machine, command, sizes."""

    def pid(self, rank: int) -> int | None:
        """Return the process of a worker; None if it is not known, as of one on another host."""

    def times(self, rank: int, step: int) -> Times | None:
        """Return where a worker spent one of the last two steps; None if it did not end it.

        Of a worker other than this one only once all have met since, as they do in the next step.
        """

    def memory(self, rank: int) -> int | None:
        """Return how many bytes of its device a worker's tensors took lately; None on CPUs.

        Each worker looks when a call begins, and at most ten times a second after a step.
        """

    def say(self, line: str) -> None:
        """Show one line to the user, without disturbing the progress bar.

        Every worker may; the line is shown by the one for which ``is_first`` holds. So all must
        know what it says; the leader may be another one.
        """

    def once(self, work: Callable[[], str], purpose: str) -> str:
        """Have the leader do something; if it is lost meanwhile, the next leader does it.

        Collective: every rank calls it, at the same moment.

        Args:
            work: does it, and says in words what came of it; it must not raise.
            purpose: what it is, in at most 24 letters.

        Returns:
            What `work` said, on every worker, once it is done.
        """

    def written_checkpoint(self) -> Path | None:
        """Wait until the leader's newest checkpoint is written, and give its folder.

        None: there is none, it could not be written, or a launcher of ours still writes it.
        """

    def check_directory(self) -> str:
        """See, before something is written there, that the run directory is still the run's.

        If it was removed or replaced while the run goes on, what has its name now is made the
        run's own, so that no other job uses it. Any worker may ask, at any moment.

        Returns:
            Why nothing may be written there; empty where all is well, or there is no directory.
        """

    def stop(self, why: str) -> None:
        """End the run after the step under way. Collective: every rank calls it, at the same step.

        It stays ended, also after a restart, for every `fit` with a callback of this name.
        """


class Callback:
    """Takes notice of a run; override what is wanted, the rest does nothing.

    What a callback of your own changes is kept with the run: plain values, tensors, arrays and
    modules, also in lists, tuples, sets and dicts, in its attributes and those of your own objects,
    and in closures, globals and datasets that its code leads to (there up to 1 MiB each). What has
    changed since the first ``fit`` began is in checkpoints and replacements, and goes back where
    the run goes back; on each rank alone what differs from rank to rank after `on_begin`.

    A callback with ``state_dict`` and ``load_state_dict`` is kept by these alone, under its name.
    It should also have ``forget``.

    Attributes:
        needs_validation: whether ``fit`` must be called with ``validate=``.
        monitor: the mean of validations that it looks at; empty: no certain one.
        may_fail: whether training goes on where it raises something: it is told, and not called
            any more in this ``fit``. For those that only write or show, alone.
    """

    needs_validation = False
    monitor = ""
    may_fail = False

    @property
    def name(self) -> str:
        """What it is called in messages and in checkpoints."""
        return type(self).__name__

    def writes_to(self, directory: Path | None) -> Path | None:
        """Name the file or folder that it alone writes; None: there is none.

        Args:
            directory: the run's; None: it has none.
        """
        return None

    def forget(self) -> None:
        """Be as new: another run begins with it, which may then load what was kept with that.

        Called only on one with ``state_dict``, when ``fit`` begins; not by a call that goes on with
        the run of the call before.
        """

    def before_resume(self, directory: Path) -> None:
        """Before ``fit`` looks for checkpoints in the run directory, where one may be put now."""

    def on_begin(self, fit: Fit) -> None:
        """Before the first step of a call of ``fit`` here; not if there is nothing to do.

        The run stands where it goes on from. A replacement of a lost worker has this, too, when it
        has joined the others; where they have done all steps without it, when it finds them done
        (``fit.has_ended``).
        """

    def on_step_begin(self, fit: Fit) -> None:
        """Before each step."""

    def on_step_end(self, fit: Fit, step: DoneStep) -> None:
        """After each step, when parameters have been updated, before the schedule steps.

        A step that comes again, because the run went back, has this again.
        """

    def on_validation(self, fit: Fit, means: Mapping[str, Any], seconds: float) -> None:
        """After each validation, which took some seconds; all workers have the same means.

        The last one may come when ``fit.has_ended``. A run with other totals would not have it, so
        nothing that is kept with the run should follow from it.
        """

    def on_epoch_end(self, fit: Fit) -> None:
        """After the last step of an epoch, its validation and its schedule; ``fit.epoch`` ended."""

    def on_snapshot(self, fit: Fit) -> None:
        """Before the state of the run is kept in memory, as it is many times a minute.

        Should all workers be lost, their replacements go on from here at the earliest: what such
        a callback holds back, and nobody could make up for, has to be in its file now.
        """

    def on_checkpoint(self, fit: Fit, step: int) -> None:
        """After a checkpoint of the run after `step` steps was asked for; it may still be written.

        Not on a worker that joins just there.
        """

    def on_workers_changed(self, fit: Fit, before: Sequence[int], why: str) -> None:
        """After others than `before` compute together, who are ``fit.ranks``; `why`, in words.

        On a replacement that goes on alone, as all were lost, `before` is empty.
        """

    def on_went_back(self, fit: Fit, from_step: int) -> None:
        """After the run went back from `from_step` to ``fit.step``; what lay between is undone.

        What is kept with the run (``load_state_dict``) has gone back already.
        """

    def on_end(self, fit: Fit, summary: Summary) -> None:
        """After ``fit`` is over, all validations and checkpoints included."""

    def on_error(self, fit: Fit, error: BaseException) -> None:
        """After anything was raised in ``fit`` on this worker, before it leaves ``fit``.

        Also where a run with a directory is interrupted and its launcher ends this process, with a
        KeyboardInterrupt after Ctrl-C, else a SystemExit.
        """


# Those that other libraries know by name.
_NAMES = ("BestCheckpoint", "EMA", "EarlyStopping", "MLflow", "TensorBoard", "WandB")
_OTHERWISE = "derive from it, or pass an instance"


@final
class Callbacks:
    """Calls callbacks one after the other, of which one may be `calling` now.

    What one raises bears its name. Two that write the same file are refused.
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
        self._at = 0  # the one that was called last
        self.calling: Callback | None = None
        writers: dict[str, str] = {}
        for callback in self._callbacks:
            if (path := callback.writes_to(directory)) is None:
                continue
            place = os.path.realpath(path)
            if place in writers:
                raise ValueError(
                    f"each callback must write a file of its own, but {writers[place]} and "
                    f"{callback.name} both write {path}: give one of them another `path`."
                )
            writers[place] = callback.name

    def __iter__(self) -> Iterator[Callback]:
        return iter(self._callbacks)

    @property
    def names(self) -> list[str]:
        """What they are called; the second of a name has a number behind it."""
        seen: Counter[str] = Counter()
        names: list[str] = []
        for name in [callback.name for callback in self._callbacks]:
            seen[name] += 1
            names.append(name if seen[name] == 1 else f"{name} {seen[name]}")
        return names

    def forget_others(self, known: Mapping[str, Any]) -> None:
        """Have callbacks with a state begin anew, but for those that the run has gone on with."""
        ids = set(map(id, known.values()))
        for callback in self._callbacks:
            if hasattr(callback, "state_dict") and id(callback) not in ids:
                callback.forget()

    def keep_states(self, state: dict[str, Any]) -> None:
        """Have their states kept with a run's, also of those that came later."""
        for name, callback in zip(self.names, self._callbacks, strict=True):
            if not hasattr(callback, "state_dict") or state.get(name) is callback:
                continue
            # The run may have been taken up without it.
            kept, state[name] = state.get(name), callback
            if isinstance(kept, Mapping):
                state[name].load_state_dict(kept)

    def call(self, moment: str, fit: Fit, *arguments: Any) -> None:
        """Call the method named `moment` of all of them; CallbackError: what one has raised."""
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
                    f"{type(error).__name__}: {error}"
                )
                if not callback.may_fail:
                    raise CallbackError(trouble) from error
                self._failed.append(callback)
                fit.say(f"{trouble}; training goes on without it")
            finally:
                self.calling = None

    def behind(self, moment: str) -> list[str]:
        """Name those behind the one that was called last that do something at a moment."""
        usual, rest = getattr(Callback, moment), self._callbacks[self._at + 1 :]
        return [each.name for each in rest if getattr(type(each), moment) is not usual]
