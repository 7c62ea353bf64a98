"""What torchrun starts on each of several hosts: a launcher of ours, which knows of the others.

The launchers tell each other how many workers they start, in torchrun's store. Then this process
becomes `unisono run`, as torch is of no more use to it.
"""

from __future__ import annotations

import os
import sys

from unisono.timeouts import RENDEZVOUS
from unisono.workers.host_member import TOKEN_VARIABLE
from unisono.workers.rendezvous import meet
from unisono.world import HOSTS_VARIABLE, world


def main(arguments: list[str]) -> None:
    """Become `unisono run` with these arguments, of which the first two are `-n WORKERS`."""
    rendezvous = meet(world(), os.environ, RENDEZVOUS.in_s())
    sizes = rendezvous.gather("number of workers", arguments[1])
    environ = {**os.environ, HOSTS_VARIABLE: ",".join(sizes), TOKEN_VARIABLE: rendezvous.token}
    sys.stdout.flush()
    os.execve(sys.executable, [sys.executable, "-m", "unisono", "run", *arguments], environ)


if __name__ == "__main__":
    main(sys.argv[1:])
