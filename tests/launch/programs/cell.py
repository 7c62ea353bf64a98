"""Launches workers from a script, as a notebook's kernel does; its server is kept after that."""

import os
import sys
import time

import unisono


def work(is_endless):
    print(os.getpid(), flush=True)
    while is_endless:
        time.sleep(1)


if __name__ == "__main__":
    unisono.launch(work, False, workers=1)
    if sys.argv[1] == "busy":
        # A fork of the kernel has all that the kernel has.
        if os.fork() == 0:
            time.sleep(60)
            os._exit(0)
        unisono.launch(work, True, workers=1)
    time.sleep(600)
