"""What the parts of one run share: its state, its workers, its checkpoints, its observer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from unisono.data.fingerprint import Fingerprint
from unisono.device import Device
from unisono.exchange.run_memory import RunMemory
from unisono.notices import say
from unisono.plan.samples import SamplePlan
from unisono.state.run_state import RunState
from unisono.step.engine import StepEngine
from unisono.step.scaling import LossScaling
from unisono.train.checkpoints import Checkpoints
from unisono.train.loop_plan import Totals
from unisono.train.run_options import RunOptions
from unisono.workers.joint_calls import JointCalls
from unisono.workers.team import Team


class Observer:
    """Follows a run; this one is for custom training loops and prints what is to be said.

    Attributes:
        runs_program_code: whether code of the program runs between steps.
    """

    runs_program_code = True

    def say(self, line: str) -> None:
        """Show the user one line."""
        say(line)

    def before_snapshot(self) -> None:
        """Called on every worker before the state of the run is copied."""

    def before_pause(self) -> None:
        """Called on every worker before all stop between two steps, maybe for good."""


@dataclass(slots=True)
class RunContext:
    """One run, as its parts see it. Final."""

    options: RunOptions  # what the program passed
    kept: RunState  # how far the run has come, and all that is saved with it
    team: Team  # the workers
    joint_calls: JointCalls  # what they have done together
    scaling: Mapping[str, LossScaling]  # how losses are scaled, by the names of optimizers
    fixed: dict[str, Any]  # what fixes the run's bits, by name, beside samples and versions
    is_unseeded: bool  # random numbers were drawn without a seed before the run was made
    exchange: str  # the name of what sums gradients
    device: Device  # where this worker computes
    shards: int | None  # S; None before the first loop, if the program has left it out
    checkpoints: Checkpoints | None = None  # where they go; None: nowhere
    observer: Observer = field(default_factory=Observer)  # who follows the run now
    # computes a batch's loss; None in loops where the program does that
    loss: Callable[[nn.Module, Any], Any] | None = None
    named: Mapping[str, Any] = field(default_factory=dict)  # what its own loop may use, by name
    functions: Sequence[Any] = ()  # what of the program runs in the loop's passes, as far as known
    engine: StepEngine | None = None  # computes the steps of the loop under way
    memory: RunMemory | None = None  # of the newest loop
    seen: tuple[int, Fingerprint] | None = None  # of the data set of a loop, by its number
    plan: SamplePlan | None = None  # which samples the epoch under way has
    has_resumed: bool = False  # no checkpoint is to be looked for any more
    has_joined: bool = False  # see `unisono.Run`
    is_ahead: bool = False  # likewise
    num_loops: int = 0  # that the program has come to
    loop: str = ""  # tells the newest of them apart when the program is started again
    goes_on: bool = False  # `unisono.Run.go_on` was called after the last stop
    # by rank, what computes the same bits; empty if all devices do, None before the first loop
    kinds: dict[int, str] | None = None
    has_told_unused: bool = False  # parameters without a gradient were looked for
    told: set[str] = field(default_factory=set)  # what is said once in a run, and has been said

    @property
    def program(self) -> dict[str, Any]:
        """What of the program runs in a step, by name."""
        kept = self.kept
        return {
            "loss": self.functions,
            "loop": self.named,
            "model": kept.model,
            "optimizer": kept.optimizer,
            "on_gradients": self.options.on_gradients,
        }

    def say(self, line: str) -> None:
        """Show the user one line."""
        self.observer.say(line)

    def say_once(self, line: str) -> None:
        """Show one line in the whole run, if this is the worker that speaks for all."""
        if line not in self.told:
            self.told.add(line)
            if self.team.position == 0 and not self.joint_calls.is_behind:
                self.say(line)

    @property
    def takes_closure(self) -> bool:
        """Whether the optimizer is called with a closure."""
        return self.options.takes_closure(self.kept.optimizer)

    @property
    def is_deterministic(self) -> bool:
        """Whether torch is to choose deterministic kernels; on the CPU they are."""
        return self.options.exact and not self.device.is_host

    @property
    def is_stopped(self) -> bool:
        """Whether the run was stopped where it stands."""
        stopped_at = self.kept.last.get("stopped_at")
        return isinstance(stopped_at, int) and self.kept.position.step >= stopped_at

    def is_over(self, totals: Totals) -> bool:
        """Tell whether the run goes no further."""
        return self.is_ahead or self.is_stopped or totals.are_reached(self.kept.position)
