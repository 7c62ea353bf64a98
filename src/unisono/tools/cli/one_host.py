"""The program that torch's agent starts on each of several hosts: a launcher that knows the others.

The launchers exchange their numbers of workers in the agents' store. Then this process becomes
`unisono run`, because it no longer needs torch.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence

from unisono.errors import PeerLostError, RendezvousError, UnisonoError, WaitTimeoutError
from unisono.runtime.launch.report import TRY_AGAIN
from unisono.runtime.notices import say
from unisono.runtime.procfs import die_with
from unisono.runtime.signals import AGENT_ENDED
from unisono.runtime.timeouts import RENDEZVOUS
from unisono.runtime.workers.host_member import TOKEN_VARIABLE
from unisono.runtime.workers.rendezvous import meet
from unisono.runtime.world import HOSTS_VARIABLE, world


def main(arguments: Sequence[str]) -> None:
    """Become `unisono run` with all arguments but the first, this host's number: `-n WORKERS …`."""
    signal.signal(AGENT_ENDED, signal.SIG_DFL)  # nohup protects the agent alone
    die_with(os.getppid(), AGENT_ENDED)
    number, *options = arguments
    try:
        rendezvous = meet(world(), os.environ, RENDEZVOUS.in_s())
        told = rendezvous.gather("number of workers", [int(number), int(options[1])])
        sizes = sizes_of_hosts([tuple(one) for one in told])
        place = sorted(other for other, _ in told).index(int(number))  # some hosts may be missing
    except (ValueError, UnisonoError) as error:
        say(str(error))
        sys.exit(TRY_AGAIN if isinstance(error, PeerLostError | WaitTimeoutError) else 1)
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)
    own = {"RANK": str(place), HOSTS_VARIABLE: ",".join(map(str, sizes))}
    environ = {**os.environ, **own, TOKEN_VARIABLE: rendezvous.token}
    sys.stdout.flush()
    os.execve(sys.executable, [sys.executable, "-m", "unisono", "run", *options], environ)


def sizes_of_hosts(told: Sequence[tuple[int, int]]) -> list[int]:
    """Return the numbers of workers in the order of the hosts."""
    numbers = [number for number, _ in told]
    for number in numbers:
        if numbers.count(number) > 1:
            raise RendezvousError(
                f"`--node-rank` must differ on each of {len(told)} hosts, but is {number} "
                f"on {numbers.count(number)}: number them from 0."
            )
    return [workers for _, workers in sorted(told)]


if __name__ == "__main__":
    main(sys.argv[1:])
