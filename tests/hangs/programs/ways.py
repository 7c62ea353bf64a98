"""Ways to hold the others up, for `plain.py` and `trained.py`; each says first that it begins."""

import ctypes
import itertools
import os
import signal
import sys
import threading
import time

LOCK = threading.Lock()
NOTE = sys.argv[2]


def begin():
    """Note when the hang begins: what comes before is the program's start."""
    with open(NOTE, "w") as file:
        file.write(str(time.time()))


def sleep_long(index):
    begin()
    time.sleep(1000)


def take_lock(index):
    begin()
    with LOCK:
        return


def spin_in_python(index):
    begin()
    while True:
        pass


def spin_in_c(index):
    begin()
    sum(itertools.repeat(0))


def stop_itself(index):
    begin()
    os.kill(os.getpid(), signal.SIGSTOP)


def read_fifo(index):
    path = f"{NOTE}.fifo"
    os.mkfifo(path)
    begin()
    with open(path) as file:
        return file.read()


def ask(index):
    begin()
    return input("go on? ")


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


def read_slowly(index):
    """Wait for a lock on a file, as on a file system whose server holds it."""
    import fcntl

    with open(f"{NOTE}.lock", "w") as file:
        if os.fork() == 0:
            ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)
            time.sleep(1000)
        with open(f"{NOTE}.lock") as other:
            fcntl.flock(file, fcntl.LOCK_EX)
            begin()
            fcntl.flock(other, fcntl.LOCK_EX)


WAYS = {
    "asleep": sleep_long,
    "lock": take_lock,
    "python loop": spin_in_python,
    "c loop": spin_in_c,
    "stopped": stop_itself,
    "fifo": read_fifo,
    "input": ask,
    "debugger": debug,
    "disk": wait_for_disk,
    "file lock": read_slowly,
}
