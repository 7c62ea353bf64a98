"""How long may a wait for others last? One table; docs/guarantees.md shows it.

Each has an environment variable, in seconds. An argument or an option of the program comes first.
"""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Timeout:
    """A limit to a wait.

    Attributes:
        variable: the environment variable that sets it.
        default_s: what holds otherwise, in seconds.
        ends: what happens after that time.
    """

    variable: str
    default_s: float
    ends: str

    def in_s(self, environ: Mapping[str, str] | None = None) -> float:
        """Read it, in seconds.

        Args:
            environ: the variables; the process's own by default.

        Raises:
            ValueError: the variable is set to something else than seconds above 0.
        """
        text = (os.environ if environ is None else environ).get(self.variable, "")
        if not text:
            return self.default_s
        with contextlib.suppress(ValueError):
            if 0 < float(text) < math.inf:
                return float(text)
        raise ValueError(
            f"`{self.variable}` must be a number of seconds above 0, but is {text!r}: unset it."
        )


NOTICE = Timeout("UNISONO_NOTICE_AFTER", 10.0, "one line says who waits for whom; nothing ends")
RENDEZVOUS = Timeout(
    "UNISONO_RENDEZVOUS_TIMEOUT",
    300.0,
    "workers that another launcher has started give up on one that has not come",
)
MEETING = Timeout(
    "UNISONO_MEETING_TIMEOUT", 1800.0, "workers of a step give up on one that is still there"
)
GROUP = Timeout(
    "UNISONO_GROUP_TIMEOUT",
    1800.0,
    "ranks give up on one in `unisono.init`, and in collectives of its group",
)
STALL = Timeout(
    "UNISONO_STALL_TIMEOUT",
    60.0,
    "our launcher ends a worker that stands still while others wait for it",
)
LOGGER = Timeout(
    "UNISONO_LOGGER_TIMEOUT",
    30.0,
    "the end of a run stops waiting for a logger (W&B, MLflow, Trackio) to send the rest",
)
TIMEOUTS = (NOTICE, RENDEZVOUS, MEETING, GROUP, STALL, LOGGER)
