"""The fork server: who starts workers in milliseconds? A process that has loaded torch and waits.

    launcher ──ToServer──► server ──fork──► workers
             ◄─FromServer─

Invariant: one thread, so that forking is safe; no worker outlives it and it does not outlive its
launcher (the kernel sees to both, with parent-death signals; and it sees the end of the channel).
"""

from __future__ import annotations

import gc
import importlib
import os
import selectors
import signal
import socket
import weakref
from collections import deque
from typing import NoReturn

from unisono.runtime.procfs import die_with
from unisono.runtime.signals import ENDING_SIGNALS
from unisono.runtime.workers import launcher_messages as messages
from unisono.runtime.workers.channel import Channel

# What every training script needs; torch loads _dynamo with the first optimizer.
PRELOADED = (
    *("torch", "torch._dynamo", "numpy.random", "cloudpickle"),
    *("unisono.runtime.launch.worker", "unisono.training.trainer"),
)


def main(channel_fd: int, launcher_pid: int) -> NoReturn:
    """Load torch, then serve until the launcher is gone."""
    if not die_with(launcher_pid):
        os._exit(0)
    for signum in ENDING_SIGNALS:
        signal.signal(signum, signal.SIG_IGN)
    # Held back by the launcher since before this process began.
    signal.pthread_sigmask(signal.SIG_UNBLOCK, ENDING_SIGNALS)
    channel = Channel.from_fd(channel_fd)
    load()
    _Server(channel).serve()


def load() -> None:
    """Load what every script needs, so that forks of this process begin and end at once."""
    # What is imported stays; looking for garbage in it meanwhile is a fifth of the start-up.
    gc.disable()
    for name in PRELOADED:
        importlib.import_module(name)
    # torch takes its operators back at the end, one by one: 55 ms of each worker, for nobody.
    for finalizer in list(getattr(weakref.finalize, "_registry", ())):
        finalizer.atexit = False
    # Frozen objects are not visited by the workers' collector, so their pages stay shared.
    gc.freeze()
    gc.enable()


class _Server:
    """The loop: requests from the launcher, deaths of the children."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._rank_of_pid: dict[int, int] = {}
        self._waiting: deque[messages.Message] = deque()
        self._wakeup, self._wakeup_writing = socket.socketpair()
        self._selector = selectors.DefaultSelector()

    def serve(self) -> NoReturn:
        self._wakeup.setblocking(False)
        self._wakeup_writing.setblocking(False)
        signal.signal(signal.SIGCHLD, lambda signum, frame: None)
        signal.set_wakeup_fd(self._wakeup_writing.fileno(), warn_on_full_buffer=False)
        self._selector.register(self._channel, selectors.EVENT_READ)
        self._selector.register(self._wakeup, selectors.EVENT_READ)
        while not self._channel.at_end:
            self._turn({key.fileobj for key, _ in self._selector.select()})
        self._end()

    def _turn(self, ready: set[object]) -> None:
        if self._channel in ready:
            self._waiting.extend(self._channel.receive_ready())
            while self._waiting:
                self._obey(self._waiting.popleft())
        if self._wakeup in ready:
            self._wakeup.recv(4096)
        self._reap()

    def _obey(self, message: messages.Message) -> None:
        match message:
            case messages.ForkWorker():
                self._fork(message)
            case messages.SignalWorkers(ranks, signum):
                for pid, rank in self._rank_of_pid.items():
                    if rank in ranks:
                        os.kill(pid, signum)

    def _fork(self, wanted: messages.ForkWorker) -> None:
        server_pid = os.getpid()
        pid = os.fork()
        if pid == 0:
            try:
                from unisono.runtime.launch.worker import be_worker  # which loads torch

                self._let_go_of_all()
                be_worker(wanted.rank, wanted.incarnation, wanted.fds, server_pid)
            finally:
                os._exit(70)
        self._rank_of_pid[pid] = wanted.rank
        self._tell(messages.Forked(wanted.rank, pid))
        for fd in wanted.fds:
            os.close(fd)

    def _let_go_of_all(self) -> None:
        """Close what is the server's, in a fork of it."""
        signal.set_wakeup_fd(-1)
        for owned in (self._selector, self._channel, self._wakeup, self._wakeup_writing):
            owned.close()
        # Those of later ranks, whose requests came while torch was loading.
        for message in self._waiting:
            for fd in getattr(message, "fds", ()):
                os.close(fd)

    def _reap(self) -> None:
        while self._rank_of_pid:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                return
            rank = self._rank_of_pid.pop(pid)
            self._tell(messages.WorkerExited(rank, os.waitstatus_to_exitcode(status)))

    def _tell(self, message: messages.FromServer) -> None:
        try:
            self._channel.send(message)
        except ConnectionError:
            # The launcher is gone; the next turn of the loop sees it and ends everything.
            self._channel.at_end = True

    def _end(self) -> NoReturn:
        for pid in self._rank_of_pid:
            os.kill(pid, signal.SIGKILL)
        for pid in self._rank_of_pid:
            os.waitpid(pid, 0)
        os._exit(0)
