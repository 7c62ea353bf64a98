"""What one worker alone has to say: who writes a file need not be the one that shows the run."""

from __future__ import annotations

from unisono.callbacks.callback import Fit
from unisono.notices import say


def say_alone(fit: Fit, line: str) -> None:
    """Tell the user what no other worker knows of.

    ``fit.say`` shows what the first worker says. After rank 0 was lost and replaced the leader is
    another one; its line goes to the standard error then, beside the progress bar.
    """
    if fit.is_first:
        fit.say(line)
    else:
        say(line)
