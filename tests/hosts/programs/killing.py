"""Kills workers at meetings, as the variable KILLS says: where the table of faults has no place.

``KILLS="1 evaluate 2; 0+ putting back 1 after; 0' connecting 1"``: rank 1 when it comes to a
meeting whose purpose begins so for the second time in its process; rank 0 just after it has come to
one, once it was started again because others were lost; the first replacement of rank 0 when it
connects with the other hosts. ``1' stands still 1``: it does so for ever, before it has begun. The
first worker of each host says when it has looked whether the launchers of the others are alive.
"""

from __future__ import annotations

import os
import re
import signal
from collections import Counter
from collections.abc import Callable
from typing import Any

from unisono.runtime.workers import host_member
from unisono.runtime.workers.context import context
from unisono.runtime.workers.team import Team

_ROW = re.compile(r"\s*(\d+\+?'*) (.+?) (\d+)( after)?\s*")


def install() -> None:
    """Have this process die where it is to."""
    link = context().launcher
    if link is None or not os.environ.get("KILLS"):
        return
    was_lost = link.incarnation * "'"
    mine = f"{link.world.rank}{was_lost or '+' * link.is_replacement}"
    matches = [_ROW.fullmatch(row) for row in os.environ["KILLS"].split(";")]
    rows = [match.groups() for match in matches if match is not None]
    assert len(rows) == len(matches), os.environ["KILLS"]
    seen: Counter[str] = Counter()
    if any(row[:2] == (mine, "stands still") for row in rows):
        print(f"rank {mine[0]} stands still", flush=True)
        signal.pause()

    def dying(act: Callable[..., Any], purpose_of: Callable[..., str]) -> Callable[..., Any]:
        def acting(*args: Any) -> Any:
            purpose = purpose_of(*args)
            due = [row for row in rows if row[0] == mine and purpose.startswith(row[1])]
            seen.update({row[1] for row in due})
            due = [row for row in due if int(row[2]) == seen[row[1]]]
            if any(row[3] is None for row in due):
                os.kill(os.getpid(), signal.SIGKILL)
            result = act(*args)
            if due:
                os.kill(os.getpid(), signal.SIGKILL)
            return result

        return acting

    is_gone = host_member.Launchers.is_gone

    def looking(launchers: host_member.Launchers, host: int) -> bool:
        found = is_gone(launchers, host)
        if not seen["looks"]:
            seen["looks"] = 1
            print(f"rank {mine[0]} has looked", flush=True)
        return found

    host_member.Launchers.is_gone = looking
    Team.arrive = dying(Team.arrive, lambda team, purpose: purpose)
    connect = dying(host_member.connect_hosts, lambda rendezvous, address: "connecting")
    host_member.connect_hosts = connect
