"""torch's agent, which starts Unisono's launcher on each of several hosts, and again after a loss.

Rendezvous and restarts are those of torchrun, except for the following:

* A run that has ended for good, by an exception or Ctrl-C, is not started again. The rendezvous is
  closed, so that no host waits there for others, and all end with the same exit status.
* A lost host is waited for, host 0 and the rendezvous with it too: all begin again once it, or
  another in its place, is there. Starts count as long as they follow within a minute.
* A long wait for other hosts is reported; our launcher's message and exit status come last.
* Signals are passed on to the launcher, which finishes the step. It ends with this process.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from types import FrameType
from typing import Any, final

from torch.distributed import DistError
from torch.distributed.elastic.agent.server import api
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousError,
    RendezvousTimeoutError,
)
from typing_extensions import override

from unisono.errors import UnisonoError
from unisono.runtime.launch.recovery import PERIOD_S
from unisono.runtime.launch.report import TRY_AGAIN
from unisono.runtime.notices import say
from unisono.runtime.signals import ENDING_SIGNALS
from unisono.runtime.timeouts import NOTICE, RENDEZVOUS
from unisono.tools.cli.endings import SeveralHosts
from unisono.tools.cli.hosts_rendezvous import NumHostsError, meet_hosts

_LOOK_EVERY_S = 0.5
# Number of checks whether another host has ended for good before a host that misses it begins
# again, and before a launcher whose workers do not miss it is ended.
_LOOKS_AFTER_LOSS, _LOOKS = 4, 6
_STAYS_AT_MOST_S = 5.0
_BEGINNING_AGAIN = (
    f"All hosts begin again once they are there, with a `directory` from the newest checkpoint; a "
    f"lost one is waited for ({RENDEZVOUS.variable})."
)
_NO_MORE = (
    "`--restarts` allows no other start: start all hosts again; with a `directory` the run "
    "continues from its newest checkpoint."
)
_OTHERS_ENDED = "another host has ended the run: see its messages."
_ENDED_WELL = "a host has come to the end of its program"
_ENDED_WITH = "the exit status of the host that has ended the run"
_OTHERS_ENDED_WELL = (
    "another host has reached the end of its program, so this one cannot begin again: every worker "
    "must make the same calls in the same order, and exit at the end."
)


def run_agent(
    arguments: Sequence[str],
    hosts: SeveralHosts,
    *,
    rendezvous: tuple[str, int],
    address: str,
    restarts: int,
    await_first: Callable[[], None],
) -> int:
    """Run Python with these arguments when all hosts do, again after a loss; return its status.

    Others reach this host at `address`. `await_first` waits for the rendezvous, or raises a
    UnisonoError.
    """
    place, name, is_first = hosts.rendezvous, hosts.name, hosts.has_rendezvous
    logging.disable(logging.ERROR)  # torch's agent is silent; messages come from here
    os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = "SIGQUIT"  # other signals are handled here

    def run() -> int | None:
        handler = meet_hosts(
            rendezvous, hosts.nnodes, address=address, is_first=is_first, name=name
        )
        spec = api.WorkerSpec(
            role="unisono",
            local_world_size=1,
            rdzv_handler=handler,
            entrypoint=sys.executable,
            args=tuple(arguments),
            max_restarts=restarts,
            local_addr=address,
        )
        try:
            result = HostAgent(spec, place).run()
        finally:
            handler.shutdown()
        return result and int(result.is_failed())

    lost = f"the rendezvous at {place} was lost{'' if name else ', with host 0'}"
    try:
        if (status := _run_again(run, lost, await_first, 0 if is_first else restarts)) is not None:
            return status
        say(_OTHERS_ENDED)  # while this host waited for them
    except (NumHostsError, UnisonoError) as error:
        say(str(error))
    except RendezvousTimeoutError:
        say(
            f"{hosts.nnodes} hosts must reach {place} within {RENDEZVOUS.in_s():g} s, but not "
            f"all have: check that `unisono run` was started on each, with the same `--nnodes` "
            f"and `--rendezvous`; {RENDEZVOUS.variable} waits longer (s)."
        )
    except RendezvousClosedError:
        say(f"{_OTHERS_ENDED} Start another run with another NAME." if name else _OTHERS_ENDED)
    except RendezvousError as error:
        say(
            f"the rendezvous at {place} must be there until the run ends, but is not "
            f"({error.__cause__ or error}): check {'it' if name else 'the messages of host 0'}."
        )
    return 1


def _run_again(
    run: Callable[[], int | None], lost: str, await_first: Callable[[], None], restarts: int
) -> int | None:
    """Run an agent, and another one when the rendezvous is back after it was lost with host 0."""
    num_left = restarts
    while True:
        begun_s = time.monotonic()
        try:
            return run()
        except RendezvousConnectionError:
            num_left = _num_left(num_left, restarts, begun_s)
            if num_left < 0:
                raise
            say(f"{lost}. {_BEGINNING_AGAIN}")
            await_first()


def _num_left(num_left: int, restarts: int, begun_s: float) -> int:
    """Return the starts left after one more; a run of a minute restores all of them."""
    return (restarts if time.monotonic() - begun_s > PERIOD_S else num_left) - 1


@final
class HostAgent(LocalElasticAgent):
    """torch's agent for one launcher of Unisono."""

    def __init__(self, spec: api.WorkerSpec, place: str) -> None:
        super().__init__(spec, DefaultLogsSpecs(os.devnull))  # otherwise a folder would remain
        self._place, self._status = place, 0
        self._look_at_s, self._num_looks_closed = 0.0, 0
        self._begun_s = time.monotonic()
        for signum in ENDING_SIGNALS:
            if signum != signal.SIGHUP or signal.getsignal(signum) != signal.SIG_IGN:  # by nohup
                signal.signal(signum, self._pass_on)

    def _pass_on(self, signum: int, frame: FrameType | None) -> None:
        """End the launcher; if there is none, end at once."""
        self._status = 128 + signum
        if signum == signal.SIGHUP:
            # When a terminal closes, both the kernel and a shell may send SIGHUP.
            signal.signal(signum, signal.SIG_IGN)
            signum = signal.SIGTERM
        self._end_launcher(signum)

    def _end_launcher(self, signum: int) -> None:
        for pid in self._pcontext.pids().values() if self._pcontext is not None else ():
            with suppress(ProcessLookupError):
                os.kill(pid, signum)
                return
        sys.exit(self._status)

    def _rendezvous(self, worker_group: api.WorkerGroup) -> None:
        line = (
            f"{NOTICE.in_s():.0f} s have passed at {self._place}, and not all hosts have arrived."
        )
        notice = threading.Timer(NOTICE.in_s(), say, [line])
        notice.start()
        try:
            super()._rendezvous(worker_group)
        except DistError as error:  # the first host was lost during it
            raise RendezvousConnectionError(str(error)) from error
        finally:
            notice.cancel()
        self._begun_s = time.monotonic()

    def _restart_workers(self, worker_group: api.WorkerGroup) -> None:
        if worker_group.state == api.WorkerState.HEALTHY:
            say("another host has joined: all finish the step, and begin again with it.")
        super()._restart_workers(worker_group)

    @override
    def _monitor_workers(self, worker_group: api.WorkerGroup) -> api.RunResult:
        """Monitor the workers; raise SystemExit if the run has ended for good."""
        result: api.RunResult = super()._monitor_workers(worker_group)
        if result.state == api.WorkerState.HEALTHY:
            self._end_with_others()
        elif result.state == api.WorkerState.SUCCEEDED:
            with suppress(DistError):  # the first host was lost
                self._store_of_round.set(_ENDED_WELL, "")
        elif result.is_failed():
            (failure,) = result.failures.values()
            status = self._status or failure.exitcode
            if status == TRY_AGAIN or status < 0:
                if not (how := self._how_others_end()):
                    most = worker_group.spec.max_restarts
                    num_left = _num_left(self._remaining_restarts, most, self._begun_s)
                    self._remaining_restarts = num_left + 1  # torch subtracts one
                    say(_BEGINNING_AGAIN if num_left >= 0 else _NO_MORE)
                    return result
                say(how)
                status = self._status_of_others()
            # Let no other host wait for this one, neither to begin again nor to end.
            barrier: Any = self._exit_barrier  # without types, as the next
            handler: Any = worker_group.spec.rdzv_handler
            with suppress(DistError, RendezvousError):
                self._store_of_round.compare_set(_ENDED_WITH, "", str(status))
                handler.set_closed()
            self._exit_barrier_timeout = _STAYS_AT_MOST_S
            barrier()
            sys.exit(status)
        return result

    def _end_with_others(self) -> None:
        """End the launcher if another host has ended for good, and workers do not notice."""
        if time.monotonic() < self._look_at_s:
            return
        self._look_at_s = time.monotonic() + _LOOK_EVERY_S
        self._num_looks_closed += self._is_closed
        if self._num_looks_closed == _LOOKS:
            say(_OTHERS_ENDED)
            self._status = self._status_of_others()
            self._end_launcher(signal.SIGTERM)

    def _how_others_end(self) -> str:
        """Wait a moment for another host to report that the run has ended; empty if none does."""
        for _ in range(_LOOKS_AFTER_LOSS):
            try:
                if self._is_closed:
                    return _OTHERS_ENDED
                if self._store_of_round.check([_ENDED_WELL]):
                    return _OTHERS_ENDED_WELL
            except DistError as error:  # the first host was lost
                raise RendezvousConnectionError(str(error)) from error
            time.sleep(_LOOK_EVERY_S)
        return ""

    def _status_of_others(self) -> int:
        """Return the status of the host that has ended the run: all end with that."""
        with suppress(DistError, ValueError):
            if self._store_of_round.check([_ENDED_WITH]):
                status = int(self._store_of_round.get(_ENDED_WITH))
                return status if 0 < status < 256 else 1  # a stranger may write there
        return 1

    @property
    def _store_of_round(self) -> Any:  # torch's, which has no types
        return self._store

    @property
    def _is_closed(self) -> bool:
        return bool(self._worker_group.spec.rdzv_handler.is_closed())
