"""How are workers watched? By one loop in the launcher, which carries out what ``policy`` decides.

    server: exited ─┐            ┌─► control block (who has left)
    workers: done,  ├─► policy ──┼─► signals, through the server
      failed        │            └─► kill the server
    signals, clock ─┘

``request_handler`` answers workers' requests. Nothing is decided here.
"""

from __future__ import annotations

import contextlib
import math
import os
import selectors
import signal
import socket
import time
from collections import deque
from dataclasses import dataclass, replace
from functools import partial

from unisono.runtime.checkpoint.writer import CheckpointWriter
from unisono.runtime.faults import FAULTS_VARIABLE, disk_full, read_faults
from unisono.runtime.launch import policy, recovery
from unisono.runtime.launch.forkserver import ForkServer, refused
from unisono.runtime.launch.hang_watch import HangWatch, Scene
from unisono.runtime.launch.job import FUNCTION, Job
from unisono.runtime.launch.outputs import Outputs
from unisono.runtime.launch.recovery import MarkDeparture
from unisono.runtime.launch.report import ending, spare_message
from unisono.runtime.launch.request_handler import RequestHandler
from unisono.runtime.launch.sign_of_life import SignOfLife
from unisono.runtime.launch.stall_watch import StallWatch
from unisono.runtime.notices import say
from unisono.runtime.procfs import started_at
from unisono.runtime.signals import AGENT_ENDED, NOTICES, ONE_SIGNAL_S, Signals
from unisono.runtime.workers import launcher_messages as messages
from unisono.runtime.workers.channel import Channel
from unisono.runtime.workers.control_block import ControlBlock
from unisono.runtime.workers.job_store import MEMORY_NAME
from unisono.runtime.workers.membership import Membership

# A longer step may be cut off: Open MPI kills a job 2 s after a notice, most others after 30 s.
_KEEPS_AFTER_S = 1.0
# How many workers to request from the fork server before it answers. More would fill its socket
# while its answers fill the launcher's, and both would wait for each other.
_ASKED_AT_MOST = 16
_IN_A_GROUP = "they use a process group of torch.distributed, which no replacement can join"


@dataclass(frozen=True, slots=True)
class JobResult:
    """How a job ended."""

    state: policy.JobState  # failures and interrupts, as the policy saw them
    results: dict[int, bytes]  # the pickled result of each worker that finished, by rank
    server_is_usable: bool  # the fork server can start another job
    is_saved: bool = True  # the newest state is on the disk, if it was to be stored


def supervise(server: ForkServer, job: Job, signals: Signals | None = None) -> JobResult:
    """Start the workers of `job` and watch them until they end; kill them on an exception."""
    supervision = _Supervision(server, job, signals)
    try:
        supervision.watch()
    except BaseException:
        server.kill()
        raise
    finally:
        supervision.close()
    usable, is_saved = supervision.server_is_usable, supervision.is_saved
    return JobResult(supervision.state, supervision.results, usable, is_saved)


class _Supervision:
    """The sockets and the control block of one job, and the loop over them."""

    def __init__(self, server: ForkServer, job: Job, signals: Signals | None) -> None:
        everybody = frozenset(range(job.num_workers))
        self.state = policy.JobState(everybody, needs_result=job.kind == FUNCTION)
        self.results: dict[int, bytes] = {}
        self.server_is_usable = True
        self._server = server
        self._signals = signals
        self._outputs = Outputs()
        self._sign = SignOfLife(job)
        self._job_fd = replace(job, master_port=self._sign.port).write()
        self._store_fd = os.memfd_create(MEMORY_NAME, os.MFD_CLOEXEC)
        self._control = ControlBlock.create(job.num_workers)
        self._channels: dict[int, Channel] = {}
        self._pids: dict[int, int] = {}
        self._to_start = deque(range(job.num_workers))
        self._asked: set[int] = set()  # workers whose start the server has not confirmed yet
        self._unstarted: dict[int, str] = {}  # why workers could not be started
        self._to_start_again: set[int] = set()  # workers that are killed first
        self._spared: set[int] = set()
        self._condemned: dict[int, str] = {}
        self._has_groups = False
        self._told_until_s, self.is_saved = -math.inf, True
        self._keeps_at_s = math.inf
        self._incarnations = dict.fromkeys(range(job.num_workers), -1)
        # With several hosts, one launcher cannot tell which worker waits for which.
        self._is_one_of_several = bool(job.hosts)
        self._first_rank = job.first_rank if job.hosts else 0
        self._watch = StallWatch(self._control, job.stall_timeout_s)
        self._hangs = HangWatch(self._control, job.folder, say)
        self._selector = selectors.DefaultSelector()
        self._selector.register(server.channel, selectors.EVENT_READ, self._read_server)
        self._selector.register(self._outputs, selectors.EVENT_READ, None)  # read in each iteration
        if signals is not None:
            self._selector.register(signals, selectors.EVENT_READ, self._read_signals)
        self._woken, self._waking = socket.socketpair()
        self._selector.register(self._woken, selectors.EVENT_READ, self._read_writer)
        faults = read_faults(job.environ.get(FAULTS_VARIABLE, ""))
        writer = CheckpointWriter(say, lambda number: disk_full(faults, number))
        members = recovery.RecoveryState(
            Membership.of(job.num_workers),
            restarts=job.restarts,
            replaces=job.replaces,
            world_size=job.num_workers,
            first_rank=job.first_rank if job.hosts else None,
        )
        self._requests = RequestHandler(self._control, self, members, writer, self._wake)

    def spawn(self, rank: int) -> None:
        """Start a worker, or the replacement of a lost one, once the server is ready."""
        self._to_start.append(rank)
        self._start_next()

    def _start_next(self) -> None:
        # A killed worker may still write to the memory that those started again read.
        while not self._to_start_again and self._to_start and len(self._asked) < _ASKED_AT_MOST:
            rank = self._to_start.popleft()
            try:
                self._start(rank)
            except ConnectionError:
                return  # the loop will find the end of the server's channel and report it
            except OSError as error:  # such as a limit on open files
                self._asked.discard(rank)
                self._unstarted[rank] = f"could not be started ({refused(error).rstrip('.')})"

    def _start(self, rank: int) -> None:
        self._incarnations[rank] += 1
        self._asked.add(rank)
        ours, theirs = Channel.pair()
        self._channels[rank] = ours
        self._selector.register(ours, selectors.EVENT_READ, partial(self._read_worker, rank))
        standard: list[int] = []
        try:
            standard = self._outputs.standard_fds()
            fds = *standard, self._job_fd, self._control.fd, self._store_fd, theirs.fileno()
            self._server.channel.send(messages.ForkWorker(rank, self._incarnations[rank], fds))
        finally:
            theirs.close()
            for fd in standard:
                os.close(fd)

    def send(self, rank: int, message: messages.ToWorker) -> None:
        """Send one message to a worker."""
        # If the worker has just died, the server will report how.
        with contextlib.suppress(ConnectionError):
            if (channel := self._channels.get(rank)) is not None:
                channel.send(message)

    def start_again(self, lost: int | None) -> None:
        """Kill all workers that have not finished; once all are gone, start them again."""
        if lost is None and not self._to_start_again:
            say("a worker of another host was lost; all workers start again.")
        self._control.head.starts_again = 1
        self._sign.show(self._selector)
        self._to_start_again |= (self._pids.keys() | self._asked) - self.state.done
        self._server.signal(sorted(self._to_start_again), signal.SIGKILL)
        if lost is not None:
            self._control.clear(lost)
            self.spawn(lost)

    def end(self) -> None:
        """End the job, which has nothing left to do."""
        self._take(policy.end_now(self.state, time.monotonic()))

    def watch(self) -> None:
        """Start the workers, and run until none is left."""
        self._start_next()
        while not self.state.over:
            timed = (self.state, self._watch, self._outputs)
            due_s = min(*(one.due_s for one in timed), self._poll_hangs_s, self._keeps_at_s)
            ready = self._selector.select(max(0.0, due_s - time.monotonic()))
            # Print a worker's output before any message about its end.
            self._outputs.pump()
            for key, _ in ready:
                # A second signal kills the server and closes its channel; the job is then over.
                if key.data is not None and self.server_is_usable:
                    key.data()
            while self._unstarted:
                rank, how = self._unstarted.popitem()
                self._exited(rank, os.EX_OSERR, how)
            self._take(policy.time_passed(self.state, time.monotonic()))
            if time.monotonic() >= self._keeps_at_s:
                self._keeps_at_s = math.inf
                self._requests.write_meanwhile()
            if self.server_is_usable:
                self._poll_workers()
        # With several hosts, a host that ends may wait for a step that another host never finishes.
        is_cut_off = self._is_one_of_several and self.state.interrupted_by is not None
        if self.state.cause is not None or is_cut_off:
            self._requests.write_last()

    def close(self) -> None:
        self._hangs.close()
        signals, heard = self._signals, list[int]()

        def is_enough() -> bool:
            heard.extend(signals.read() if signals is not None else ())
            return len(heard) > self._is_one_of_several  # its agent sends one as another host ends

        self._requests.close(is_enough)
        self.is_saved = self._requests.is_saved
        # A cycle would keep the control block's mapping and descriptor until the next collection.
        del self._requests, self._hangs, self._watch
        self._outputs.close()
        self._selector.close()
        self._control.close()
        for end in (self._sign, self._woken, self._waking):
            end.close()
        for channel in self._channels.values():
            channel.close()
        os.close(self._job_fd)
        os.close(self._store_fd)

    def _wake(self) -> None:
        self._waking.send(b"w")

    @property
    def _poll_hangs_s(self) -> float:
        return math.inf if self._is_one_of_several else self._hangs.due_s

    def _poll_workers(self) -> None:
        working, membership = self.state.alive - self.state.done, self._requests.state.membership
        pids = {rank: self._pids[rank] for rank in sorted(working) if rank in self._pids}
        on_their_own = {rank: pids[rank] for rank in pids.keys() - self._requests.waiting}
        for stalled in self._watch.poll(
            on_their_own,
            membership,
            are_grouped=self._has_groups,
            is_everybody=on_their_own.keys() == working,
        ):
            say(stalled.message)
            self._condemned[stalled.rank] = stalled.how
            self._server.signal([stalled.rank], signal.SIGKILL)
        if self.state.stage is policy.Stage.RUNNING and not self._is_one_of_several:
            members = () if membership is None else membership.ranks
            ended = tuple(sorted(self._incarnations.keys() - working))
            self._hangs.poll(Scene(pids, members, ended))

    def _read_signals(self) -> None:
        assert self._signals is not None
        for signum in self._signals.read():
            # An agent that has ended cannot wait for a notice; the kernel sends its signal twice.
            is_agents = self._is_one_of_several and signum == AGENT_ENDED
            is_known = not is_agents or signum == self.state.interrupted_by
            if not is_known or time.monotonic() >= self._told_until_s:
                self._interrupt(signum, can_wait=not is_agents)

    def _interrupt(self, signum: int, *, can_wait: bool) -> None:
        # Without an agent, other hosts would not learn that the run ends: they would restart.
        self._told_until_s = time.monotonic() + ONE_SIGNAL_S
        can_wait &= self.state.interrupted_by is None
        gently = can_wait and self._requests.request_stop(signum)
        self._take(policy.interrupted(self.state, signum, time.monotonic(), gently=gently))
        if gently and signum in NOTICES:
            self._keeps_at_s = time.monotonic() + _KEEPS_AFTER_S

    def _read_writer(self) -> None:
        self._woken.recv(64)
        self._requests.written()

    def _read_server(self) -> None:
        for message in self._server.channel.receive_ready():
            match message:
                case messages.Forked(rank, pid):
                    self._pids[rank] = pid
                    self._asked.discard(rank)
                    # For outside observers, before the program takes its seat.
                    self._control.lines[rank].register(pid, started_at(pid) or 0)
                case messages.WorkerExited(rank, exit_code):
                    # A worker's last messages must be handled before its exit is judged.
                    self._read_worker(rank)
                    self._exited(rank, exit_code)
        if self.state.stage is policy.Stage.RUNNING:
            self._start_next()
        if self._server.channel.at_end:
            for rank in sorted(self.state.alive):
                self._read_worker(rank)
            self._selector.unregister(self._server.channel)
            self.server_is_usable = False
            self._take(policy.server_lost(self.state, self._server.wait()))

    def _exited(self, rank: int, exit_code: int, how: str = "") -> None:
        """Handle the exit of a worker: may the others continue without it?"""
        self._forget_channel(rank)
        condemned = self._condemned.pop(rank, "")
        how = condemned if exit_code == -signal.SIGKILL else how
        pid = self._pids.pop(rank, None)
        is_spare = exit_code != 0 and rank not in self.state.done and self._is_spare(rank)
        now, trouble = time.monotonic(), ""
        if rank in self._to_start_again:
            self._to_start_again.discard(rank)
            if policy.may_survive(self.state, rank, exit_code):
                self._requests.forget(rank)
                self._control.clear(rank)
                self._incarnations[rank] -= 1  # it was not lost
                self.spawn(rank)
                return
        elif policy.may_survive(self.state, rank, exit_code) and rank not in self._spared:
            trouble = self._requests.lost(rank, pid, how or ending(exit_code), now)
            if not trouble:
                waiting = (self._channels, self._to_start, self._unstarted)
                if not any(rank in ranks for ranks in waiting):
                    self._take(policy.left_behind(self.state, rank))
                return
        self._requests.mark_gone(rank)
        if not is_spare:
            self._take(policy.exited(self.state, rank, exit_code, now, note=trouble, how=how))
            return
        if rank not in self._spared:
            say(spare_message(rank, f"It {how or ending(exit_code)}. {trouble}".rstrip()))
        self._spared.discard(rank)
        self._take(policy.left_behind(self.state, rank))

    def _read_worker(self, rank: int) -> None:
        if (channel := self._channels.get(rank)) is not None:
            for message in channel.receive_ready():
                self._handle(rank, message)
            if channel.at_end:
                self._forget_channel(rank)

    def _forget_channel(self, rank: int) -> None:
        if (channel := self._channels.pop(rank, None)) is not None:
            self._selector.unregister(channel)
            channel.close()

    def _handle(self, rank: int, message: messages.Message) -> None:
        match message:
            case messages.ProgramDone(payload):
                self.results[rank] = payload
                self._take(policy.done(self.state, rank))
                self._requests.mark_gone(rank)
            case messages.ProgramFailed() if self._is_spare(rank):
                say(spare_message(rank, message.traceback))
                self._spared.add(rank)
            case messages.ProgramFailed():
                if message.waited_for is not None:  # another host's are not among this job's ranks
                    missed = message.waited_for - self._first_rank
                    message = replace(message, waited_for=missed)
                failure = policy.WorkerFailure(rank, message.exit_code, message)
                self._take(policy.failed(self.state, failure, time.monotonic()))
            case messages.ShowProgress():
                self._outputs.show(message)
            case messages.MakesGroup():
                self._has_groups = True
                # The others stay in their group, which a replacement cannot join.
                self._requests.handle(rank, messages.NoRecovery(_IN_A_GROUP))
            case messages.FromWorker():
                self._requests.handle(rank, message)

    def _is_spare(self, rank: int) -> bool:
        """Return whether a worker is a replacement that the others do not need."""
        membership = self._requests.state.membership
        is_replacement = self._incarnations[rank] > 0 and self.state.stage is policy.Stage.RUNNING
        is_apart = bool(self.state.done) if membership is None else rank not in membership.ranks
        return is_replacement and is_apart

    def _take(self, decision: policy.Decision) -> None:
        self.state = decision.state
        for action in decision.actions:
            self._act(action)
        if self.state.stage is not policy.Stage.RUNNING:
            self._requests.stop_recovery()
            while self._to_start:  # no worker waits for those
                self.state = policy.left_behind(self.state, self._to_start.popleft()).state

    def _act(self, action: policy.Action) -> None:
        match action:
            case MarkDeparture(rank, how):
                self._control.leave(rank, how)
            case policy.SendSignal(ranks, signum):
                self._control.head.is_over = 1
                self._server.signal(ranks, signum)
            case policy.KillServer():
                if self.server_is_usable:
                    self._selector.unregister(self._server.channel)
                self.server_is_usable = False
                self._server.kill()
