"""All but rank 0 wait at the barrier; rank 0 never comes. Each says its pid first."""

import os
import signal

from unisono.runtime.workers.context import context

team = context().team()
team.memory(0, 1 << 20)
print(os.getpid(), flush=True)
if team.world.rank == 0:
    while True:
        signal.pause()
team.meet("test")
