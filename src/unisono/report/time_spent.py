"""Where did the time of a run go, from the start of its program to its last line?

::

    program starts   fit begins                     evaluation          end
    │  starting up   │ phases, snapshots, the rest  │          │ …      │

The phases of steps are means over the workers; what they leave of the time is between steps.
"""

from __future__ import annotations

from dataclasses import dataclass

from unisono.report.events import PHASES, End, Evaluation, Event, Start
from unisono.report.phases import PhaseTimes

_EXPLAINED = {
    "starting up": "from the start of the program to the first step: imports, data, the model",
    "loading": "reading samples, or waiting for loader processes",
    "forward": "the forward passes",
    "backward": "the backward passes",
    "waiting": "for the other workers",
    "summing": "adding up gradients",
    "updating": "the optimizer",
    "snapshots": "copies of the state in memory, from which lost workers are replaced",
    "checkpoints": "waiting until they are on the disk",
    "evaluation": "of `validate=`",
    "between": "callbacks, the event file, what the program does between steps, lost workers",
}


@dataclass(frozen=True)
class PartOfTime:
    """A part of the time of a run."""

    name: str
    seconds: float
    share: float

    @property
    def explained(self) -> str:
        """What it is."""
        return _EXPLAINED[self.name]


@dataclass
class TimeSpent:
    """What is known of a run's time beside the phases of its steps. Final."""

    startup_s: float = 0.0
    evaluation_s: float = 0.0
    snapshots_s: float = 0.0  # of fits that are over, as this and the next
    disk_s: float = 0.0
    _started_unix_s: float | None = None

    def add(self, event: Event) -> None:
        """Add the next event."""
        match event:
            case Start():
                self._add_startup(event)
            case Evaluation(seconds=float(seconds)):
                self.evaluation_s += max(seconds, 0.0)
            case End():
                self.snapshots_s += max(event.snapshots_s or 0.0, 0.0)
                self.disk_s += max(event.disk_s or 0.0, 0.0)

    def parts(self, phases: PhaseTimes, fits_s: float) -> list[PartOfTime]:
        """Divide the time of a run.

        Args:
            phases: of its steps.
            fits_s: how long its fits have lasted, in seconds.
        """
        over_steps = phases.over_steps
        phases_s = {name: sum(one.total for one in over_steps[name].values) for name in PHASES}
        seconds = {
            "starting up": self.startup_s,
            **phases_s,
            "snapshots": self.snapshots_s,
            "checkpoints": self.disk_s,
            "evaluation": self.evaluation_s,
        }
        inside_s = sum(seconds.values()) - self.startup_s
        seconds["between"] = max(fits_s - inside_s, 0.0)
        whole_s = sum(seconds.values())
        return [PartOfTime(name, one, one / whole_s) for name, one in seconds.items() if one > 0]

    def _add_startup(self, start: Start) -> None:
        began_unix_s = start.started_unix_s
        if began_unix_s is not None and began_unix_s != self._started_unix_s:
            self._started_unix_s = began_unix_s
            lasted_s = start.time_unix_s - began_unix_s
            self.startup_s += lasted_s if lasted_s > 0 else 0.0
