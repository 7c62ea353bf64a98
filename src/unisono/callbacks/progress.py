"""How far is the run? A bar on a terminal, lines elsewhere, one line in a notebook's cell."""

from __future__ import annotations

from unisono.callbacks.callback import Callback, DoneStep, Fit
from unisono.callbacks.display import Relay, display
from unisono.callbacks.summary import Summary


class Progress(Callback):
    """Shows the run and what is said about it, on one worker at a time. Always there. Final."""

    may_fail = True

    def __init__(self) -> None:
        self._fit: Fit | None = None
        self._seen = 0
        self._relay = Relay(lambda: self._fit is not None and self._fit.is_first, display)

    def on_begin(self, fit: Fit) -> None:
        """See :class:`Callback`."""
        self._fit, self._seen = fit, fit.step
        self._relay.start(fit.step, fit.end_step)

    def on_step_end(self, fit: Fit, step: DoneStep) -> None:
        """Count a step, unless it has come before the run went back."""
        if step.number >= self._seen:
            self._seen = step.number + 1
            self._relay.at(step.number)
            self._relay.step(step.epoch, step.means["loss"], step.num_samples)

    def on_end(self, fit: Fit, summary: Summary) -> None:
        """Leave the terminal as it was."""
        self._relay.stop()

    def on_error(self, fit: Fit, error: BaseException) -> None:
        """Leave the terminal as it was."""
        self._relay.stop()

    def say(self, fit: Fit, line: str) -> None:
        """Show one line that stays."""
        self._fit = fit
        self._relay.say(line)
