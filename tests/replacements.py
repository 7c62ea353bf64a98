"""Waiting for whoever replaces a lost worker, which may take long on a busy machine."""

from __future__ import annotations

import time
from typing import Any

COMES_WITHIN_S = 60.0


def wait_for_replacement(team: Any) -> None:
    """Hold a step up while somebody is missing who does not stand at the door yet."""
    end_s = time.monotonic() + COMES_WITHIN_S
    while team.size < team.world.world_size and not team.is_asked_to_stop:
        if time.monotonic() > end_s:
            break
        time.sleep(0.001)
