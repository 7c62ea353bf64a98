"""The agent of one of several hosts: it runs this host's launcher when all hosts run theirs.

    all are there ─► the launcher runs ─► the run has ended: all hosts end with the same status
          ▲                 │
          └─────────────────┘ a worker or a host was lost, or a host has joined

* A run that has ended for good, by an exception or Ctrl-C, is not started again: no host waits.
* A lost host is waited for, host 0 and the rendezvous with it, too. Starts count as long as they
  follow within a minute.
* Signals are passed on to the launcher, which finishes the step. It ends with this process.

The main thread only handles signals: a store may not answer the other one for long.
"""

from __future__ import annotations

import math
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass
from types import FrameType
from typing import final

from torch.distributed import DistError

from unisono.errors import UnisonoError
from unisono.runtime.launch.recovery import PERIOD_S
from unisono.runtime.launch.report import TRY_AGAIN
from unisono.runtime.notices import say
from unisono.runtime.signals import ENDING_SIGNALS
from unisono.runtime.timeouts import NOTICE, REMOTE, RENDEZVOUS
from unisono.runtime.workers.host_links import notice_lost_store
from unisono.runtime.workers.host_member import TOKEN_VARIABLE
from unisono.runtime.world import AGENT_VARIABLE, HOSTS_VARIABLE
from unisono.tools.cli.endings import SeveralHosts
from unisono.tools.cli.hosts_rendezvous import (
    LOOK_EVERY_S,
    Entry,
    HostsRendezvous,
    HostsStart,
    reach,
    serve,
)

# Workers notice by themselves within these times that another host has ended the run, or begins
# again; else their launcher is ended. Until they are connected, only agents notice a lost host.
_NOTICE_END_S, _NOTICE_LOSS_S = 3.0, 10.0
_EXPLAINED_WITHIN_S, _STAYS_AT_MOST_S, _ENDS_WITHIN_S = 2.0, 5.0, 30.0
_BEGINNING_AGAIN = (
    f"All hosts begin again once they are there, with a `directory` from the newest checkpoint; a "
    f"lost one is waited for ({RENDEZVOUS.variable})."
)
_NO_MORE = (
    "`--restarts` allows no other start: start all hosts again; with a `directory` the run "
    "continues from its newest checkpoint."
)
_JOINED = "another host has joined: all finish the step, and begin again with it."
_OTHERS_BEGIN_AGAIN = "another host begins again, and all others with it."
_OTHERS_ENDED = "another host has ended the run: see its messages."
_OTHERS_ENDED_WELL = (
    "another host has reached the end of its program, so this one cannot begin again: every worker "
    "must make the same calls in the same order, and exit at the end."
)


@final
@dataclass
class HostAgent:
    """Runs one host's launcher whenever all hosts run theirs."""

    command: Sequence[str]  # what the launcher gets, after its number of workers
    workers: int
    restarts: int  # how often it may begin again within a minute
    hosts: SeveralHosts
    place: tuple[str, int]  # the address and port of the rendezvous, and of the workers' store
    listening: socket.socket | None  # at the rendezvous, if that is on this host
    await_first: Callable[[], None]  # waits for the rendezvous, or raises a UnisonoError

    def __post_init__(self) -> None:
        self._me = Entry(self.hosts.node_rank, secrets.token_hex(8), self.workers)
        self._num_left, self._begun_s = self.restarts, time.monotonic()
        self._connects_until_s = math.inf
        self._rendezvous: HostsRendezvous | None = None
        self._launcher: subprocess.Popen[bytes] | None = None
        self._status = 0  # with which to end, once a signal or another host has ended the run

    def run(self) -> int:
        """Run the launcher until the run has ended for good; return its exit status."""
        for signum in ENDING_SIGNALS:
            if signum != signal.SIGHUP or signal.getsignal(signum) != signal.SIG_IGN:  # by nohup
                signal.signal(signum, self._pass_on)
        running, idle_s = ThreadPoolExecutor(1).submit(self._run), 0.0
        while not wait([running], LOOK_EVERY_S).done:
            if time.monotonic() > self._connects_until_s:
                say(
                    f"the rendezvous at {self.hosts.rendezvous} must be a store, but what listens "
                    f"there does not answer as one: check which program has that port."
                )
                return 1
            idle_s = 0.0 if self._is_running or not self._status else idle_s + LOOK_EVERY_S
            if idle_s > (_STAYS_AT_MOST_S if self._rendezvous is not None else 0.0):
                return self._status
        return running.result()

    def _pass_on(self, signum: int, frame: FrameType | None) -> None:
        self._status = 128 + signum
        if signum == signal.SIGHUP:
            # When a terminal closes, both the kernel and a shell may send SIGHUP.
            signal.signal(signum, signal.SIG_IGN)
            signum = signal.SIGTERM
        self._end_launcher(signum)

    def _end_launcher(self, signum: int = signal.SIGTERM) -> None:
        if self._launcher is not None:
            self._launcher.send_signal(signum)

    @property
    def _is_running(self) -> bool:
        return self._launcher is not None and self._launcher.poll() is None

    def _run(self) -> int:
        """Run with the rendezvous, and again once it is back after it was lost."""
        at, is_named = self.hosts.rendezvous, bool(self.hosts.name)
        try:
            while True:
                try:
                    return self._run_at_rendezvous()
                except DistError as error:
                    self._rendezvous = None
                    if self.listening or not self._may_start_again():
                        say(
                            f"the rendezvous at {at} must be there until the run ends, but is not "
                            f"({error}): check {'it' if is_named else 'the messages of host 0'}."
                        )
                        return 1
                lost = f"the rendezvous at {at} was lost{'' if is_named else ', with host 0'}"
                say(f"{lost}. {_BEGINNING_AGAIN}")
                self.await_first()
        except UnisonoError as error:
            say(str(error))
            return 1

    def _run_at_rendezvous(self) -> int:
        """Run with all hosts until the run has ended for good; return its exit status."""
        if self.listening is not None:
            store = serve(self.listening)
        else:
            self._connects_until_s = time.monotonic() + RENDEZVOUS.in_s()
            try:
                store = reach(*self.place)  # waits for an answer without any limit
            finally:
                self._connects_until_s = math.inf
            notice_lost_store(self.place[1])
        rendezvous = HostsRendezvous(store, self.hosts, self._me)
        self._rendezvous, status = rendezvous, None
        while status is None:
            start = self._await_start(rendezvous)
            status = start if isinstance(start, int) else self._run_once(rendezvous, start)
        with suppress(DistError):  # host 0 was lost, or waits no longer
            rendezvous.end(status)
            rendezvous.leave()
            until_s = time.monotonic() + (_STAYS_AT_MOST_S if status else math.inf)
            while self.listening and rendezvous.is_needed() and time.monotonic() < until_s:
                time.sleep(LOOK_EVERY_S)
        return status

    def _await_start(self, rendezvous: HostsRendezvous) -> HostsStart | int:
        """Wait until all hosts can start; or return the status of a run that ends before."""
        begun_s, notice_s, limit_s = time.monotonic(), NOTICE.in_s(), RENDEZVOUS.in_s()
        at = self.hosts.rendezvous
        while not self._status:
            if (ended := rendezvous.ended()) is not None:
                return self._ended_elsewhere(ended)
            if (start := rendezvous.look()) is not None:
                return start
            waited_s = time.monotonic() - begun_s
            if waited_s >= limit_s:
                say(
                    f"{self.hosts.nnodes} hosts must reach {at} within {limit_s:g} s, but not "
                    f"all have: check that `unisono run` was started on each, with the same "
                    f"`--nnodes` and `--rendezvous`; {RENDEZVOUS.variable} waits longer (s)."
                )
                return 1
            if waited_s >= notice_s:
                say(f"{notice_s:.0f} s have passed at {at}, and not all hosts have arrived.")
                notice_s = math.inf
            time.sleep(LOOK_EVERY_S)
        return self._status

    def _run_once(self, rendezvous: HostsRendezvous, start: HostsStart) -> int | None:
        """Run the launcher; return its exit status, or None if all hosts begin again."""
        self._begun_s, lost, follows = time.monotonic(), None, False
        self._launcher = self._started(start)
        if self._status:  # a signal came before there was a launcher
            self._end_launcher()
        try:
            follows = self._watch(rendezvous, start)
        except DistError as error:
            lost = error
            if self._await_launcher(_NOTICE_LOSS_S) is None:  # workers name the rank
                self._end_launcher()
        status = self._launchers_end(rendezvous)
        if status == 0 or self._status:
            return status and self._status
        may_begin_again = status < 0 or status == TRY_AGAIN
        was_cut_off = may_begin_again or status == 128 + signal.SIGTERM
        if lost is not None and was_cut_off:
            raise lost
        if not (follows and was_cut_off):  # an exception ends the run, though others begin again
            final = self._after_loss(rendezvous) if may_begin_again else status
            if final is not None:
                return final
        rendezvous.begin_again(start.round)
        return None

    def _started(self, start: HostsStart) -> subprocess.Popen[bytes]:
        own = {
            AGENT_VARIABLE: str(os.getpid()),
            HOSTS_VARIABLE: ",".join(str(one.workers) for one in start.entries),
            TOKEN_VARIABLE: start.token,
            "RANK": str(start.index),
            "MASTER_ADDR": self.place[0],
            "MASTER_PORT": str(self.place[1]),
            # torch's groups take the store that is there, as under torchrun.
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "TORCHELASTIC_RESTART_COUNT": str(start.round),
            "TORCHELASTIC_RUN_ID": "unisono",
        }
        command = [sys.executable, "-m", "unisono", "run", "-n", str(self._me.workers)]
        command += self.command
        return subprocess.Popen(command, env={**os.environ, **own}, start_new_session=True)

    def _watch(self, rendezvous: HostsRendezvous, start: HostsStart) -> bool:
        """Wait for the launcher's end, and end it if another host has the run end or begin again.

        Return whether it was ended so that all begin again.
        """
        over_s = math.inf
        while self._is_running:
            now_s = time.monotonic()
            ended = rendezvous.ended()
            if ended:
                rendezvous.leave()
                if self._await_launcher(_NOTICE_END_S) != 0 and not self._status:
                    say(_OTHERS_ENDED)
                    self._status = ended
                    self._end_launcher()
                return False
            if rendezvous.is_over(start):
                over_s = min(over_s, now_s)
                is_new = rendezvous.has_newcomer(start)
                if is_new or now_s > over_s + _NOTICE_LOSS_S:
                    say(_JOINED if is_new else _OTHERS_BEGIN_AGAIN)
                    self._end_launcher()
                    return True
            elif ended is None and rendezvous.lacks_one() and not rendezvous.are_connected(start):
                rendezvous.begin_again(start.round)
            self._await_launcher(LOOK_EVERY_S)
        return False

    def _await_launcher(self, timeout_s: float) -> int | None:
        """Wait for the launcher's end; return its exit status, or None if it still runs."""
        assert self._launcher is not None
        with suppress(subprocess.TimeoutExpired):
            return self._launcher.wait(timeout_s)
        return None

    def _launchers_end(self, rendezvous: HostsRendezvous) -> int:
        """Wait for the launcher's end, which was asked for; return its exit status."""
        asked_s, limit_s = time.monotonic(), _ENDS_WITHIN_S + REMOTE.in_s()
        while (status := self._await_launcher(LOOK_EVERY_S)) is None:
            with suppress(DistError):
                rendezvous.beat()
            if time.monotonic() > asked_s + limit_s:
                asked_s = time.monotonic()
                self._end_launcher()  # once more, which ends it at once
        return status

    def _after_loss(self, rendezvous: HostsRendezvous) -> int | None:
        """Return the exit status if another host has ended the run, or no start is left."""
        until_s = time.monotonic() + _EXPLAINED_WITHIN_S
        while time.monotonic() < until_s:
            if (ended := rendezvous.ended()) is not None:
                return self._ended_elsewhere(ended)
            rendezvous.beat()
            time.sleep(LOOK_EVERY_S)
        may_start = self._may_start_again()
        say(_BEGINNING_AGAIN if may_start else _NO_MORE)
        return None if may_start else 1

    def _ended_elsewhere(self, status: int) -> int:
        if status == 0 and self._launcher is not None:
            say(_OTHERS_ENDED_WELL)
        else:
            again = " Start another run with another NAME." if self.hosts.name else ""
            say(_OTHERS_ENDED + again)
        return status or 1

    def _may_start_again(self) -> bool:
        """Count a start; a run of a minute restores all that `--restarts` allows."""
        if time.monotonic() - self._begun_s > PERIOD_S:
            self._num_left = self.restarts
        self._num_left -= 1
        return self._num_left >= 0
