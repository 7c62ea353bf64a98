"""How long may a wait for others last? In one table, which docs/failures.md shows.

Each timeout has an environment variable, in seconds. Arguments and options take precedence.
"""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from typing import Any

MOST_S = 1e9  # 30 years; about as much as fits into what Python and torch wait with


@dataclass(frozen=True, slots=True)
class Timeout:
    """The limit of a wait."""

    variable: str  # the environment variable that sets it
    default_s: float  # the default, in seconds

    def in_s(self) -> float:
        """Return the limit, in seconds."""
        text = os.environ.get(self.variable, "")
        if not text:
            return self.default_s
        with contextlib.suppress(ValueError):
            if 0 < float(text) <= MOST_S:
                return float(text)
        raise ValueError(
            f"`{self.variable}` must be a number of seconds above 0, at most {MOST_S:,.0f}, but is "
            f"{text!r}: unset it."
        )


def check_seconds(name: str, value: Any, timeout: Timeout) -> None:
    """Raise if an argument is not a number of seconds above 0."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not 0 < value <= MOST_S:
        raise ValueError(
            f"`{name}` must be a number of seconds above 0, at most {MOST_S:,.0f}, but is "
            f"{value!r}: pass `{name}={timeout.default_s:.0f}`."
        )


# A notice says who waits for whom; nothing ends.
NOTICE = Timeout("UNISONO_NOTICE_AFTER", 10.0)
# Workers that another launcher has started give up on a worker that has not joined.
RENDEZVOUS = Timeout("UNISONO_RENDEZVOUS_TIMEOUT", 300.0)
# Workers in a step give up on a worker that is still alive.
MEETING = Timeout("UNISONO_MEETING_TIMEOUT", 1800.0)
# Ranks give up on a rank in `unisono.distributed.init`, and in collectives of its group.
GROUP = Timeout("UNISONO_GROUP_TIMEOUT", 1800.0)
# Our launcher ends a worker that makes no progress while others wait for it.
STALL = Timeout("UNISONO_STALL_TIMEOUT", 60.0)
# The end of a run stops waiting for loggers (TensorBoard, W&B, …) to send their data.
LOGGER = Timeout("UNISONO_LOGGER_TIMEOUT", 30.0)
# A run gives up on a `directory` URL when it begins, and stops waiting for copies at its end.
REMOTE = Timeout("UNISONO_REMOTE_TIMEOUT", 300.0)
TIMEOUTS = (NOTICE, RENDEZVOUS, MEETING, GROUP, STALL, LOGGER, REMOTE)
