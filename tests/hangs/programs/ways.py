"""Ways to hold the others up, for `plain.py` and `trained.py`; each says first that it begins."""

import itertools
import os
import signal
import sys
import threading
import time

LOCK = threading.Lock()
NOTE = sys.argv[2]


def begin():
    """Note that the hang begins: what comes before is the program's start."""
    open(NOTE, "w").close()


def sleep_long(index):
    begin()
    time.sleep(1000)


def take_lock(index):
    begin()
    with LOCK:
        return


def spin_in_c(index):
    begin()
    sum(itertools.repeat(0))


def stop_itself(index):
    begin()
    os.kill(os.getpid(), signal.SIGSTOP)


def debug(index):
    begin()
    breakpoint()


def wait_for_disk(index):
    """Be in the state that a network file system without a server leaves a process in.

    A fork that shares memory keeps its parent there until it executes another program, and this
    one opens a FIFO first.
    """
    path = f"{NOTE}.fifo"
    os.mkfifo(path)
    begin()
    actions = [(os.POSIX_SPAWN_OPEN, 0, path, os.O_RDONLY, 0)]
    os.posix_spawn("/bin/true", ["true"], os.environ, file_actions=actions)


WAYS = {
    "asleep": sleep_long,
    "lock": take_lock,
    "c loop": spin_in_c,
    "stopped": stop_itself,
    "debugger": debug,
    "disk": wait_for_disk,
}
