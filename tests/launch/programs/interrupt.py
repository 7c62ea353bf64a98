"""Interrupts its own launch, then launches again."""

import os
import signal

import unisono


def interrupt_launcher(pid):
    if unisono.world().rank == 0:
        os.kill(pid, signal.SIGINT)
    while True:
        signal.pause()


if __name__ == "__main__":
    try:
        unisono.launch(interrupt_launcher, os.getpid(), workers=2)
    except KeyboardInterrupt:
        print("interrupted")
    print(unisono.launch(unisono.world, workers=2)[1].rank)
