"""Waiting for whoever replaces a lost worker, which may take long on a busy machine."""

from __future__ import annotations

import dataclasses
import os
import time
from pathlib import Path
from typing import Any

COMES_WITHIN_S = 60.0
JOINED = "TESTS_JOINED"
"""A variable: the folder in which each replacement that takes a step leaves its rank."""


def wait_for_replacement(team: Any) -> None:
    """Hold a step up while somebody is missing who does not stand at the door yet."""
    if JOINED in os.environ and team.is_replacement:
        Path(os.environ[JOINED], str(team.world.rank)).touch()
    end_s = time.monotonic() + COMES_WITHIN_S
    everybody = dataclasses.astuple(team.world)[1]  # not as the program would read it
    while team.size < everybody and not team.is_stop_requested:
        if time.monotonic() > end_s:
            break
        time.sleep(0.001)
