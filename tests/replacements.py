"""Waiting for whoever replaces a lost worker, which may take long on a busy machine."""

from __future__ import annotations

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
    while team.size < team.world.world_size and not team.is_stop_requested:
        if time.monotonic() > end_s:
            break
        time.sleep(0.001)
