"""Who watches the workers? One loop in the launcher that does what ``policy`` decides.

    server: exited ─┐                    ┌─► control page (who has left)
    workers: done,  ├─► decide(state, …) ┼─► signals, through the server
      failed        │                    └─► kill the server
    signals, clock ─┘

The loop also answers the workers' requests for shared memory. It decides nothing.
"""

from __future__ import annotations

import os
import selectors
import signal
import socket
import time
from collections.abc import Iterable
from dataclasses import dataclass

from unisono.comm.channel import Channel, Message
from unisono.comm.control import ControlPage
from unisono.launch import policy
from unisono.launch.forkserver import ForkServer
from unisono.launch.job import Job
from unisono.launch.memories import SharedMemories
from unisono.launch.standard import copy_standard_fds


@dataclass(frozen=True, slots=True)
class Ended:
    """How a job ended.

    Attributes:
        state: failures and interrupts, as the policy saw them.
        results: the pickled result of each worker that finished, by rank.
        server_is_usable: the fork server can start another job.
    """

    state: policy.JobState
    results: dict[int, bytes]
    server_is_usable: bool


def supervise(
    server: ForkServer,
    job: Job,
    *,
    needs_result: bool = False,
    signals: socket.socket | None = None,
) -> Ended:
    """Start the workers of `job`, watch them to their end, and say how it was.

    Args:
        server: starts the workers; ended with them if they cannot be ended alone.
        job: what the workers do.
        needs_result: whether a worker that leaves quietly has failed.
        signals: gives the number of each signal that should end the job, as a byte.

    Raises:
        KeyboardInterrupt: raised while waiting, after all workers have been ended.
    """
    supervision = _Supervision(server, job, needs_result, signals)
    try:
        supervision.start_workers(job)
        supervision.watch()
    except KeyboardInterrupt:
        supervision.end_workers()
        raise
    except BaseException:
        server.kill()
        raise
    finally:
        supervision.close()
    return Ended(supervision.state, supervision.results, supervision.server_is_usable)


class _Supervision:
    """The sockets, the page and the memory of one job, and the loop over them."""

    def __init__(
        self, server: ForkServer, job: Job, needs_result: bool, signals: socket.socket | None
    ) -> None:
        self.state = policy.start(job.num_workers, needs_result=needs_result)
        self.results: dict[int, bytes] = {}
        self.server_is_usable = True
        self._server = server
        self._signals = signals
        self._control = ControlPage.create(job.num_workers)
        self._memories = SharedMemories(job.num_workers)
        self._channels: dict[int, Channel] = {}
        self._selector = selectors.DefaultSelector()
        self._selector.register(server.channel, selectors.EVENT_READ, None)
        if signals is not None:
            self._selector.register(signals, selectors.EVENT_READ, None)

    def start_workers(self, job: Job) -> None:
        standard = copy_standard_fds()
        job_fd = job.write()
        try:
            for rank in range(job.num_workers):
                self._start_worker(rank, [*standard, job_fd, self._control.fd])
        except ConnectionError:
            # The server is gone; the loop will find the end of its channel and say so.
            pass
        finally:
            for fd in (*standard, job_fd):
                os.close(fd)

    def _start_worker(self, rank: int, fds: list[int]) -> None:
        ours, theirs = Channel.pair()
        self._channels[rank] = ours
        self._selector.register(ours, selectors.EVENT_READ, rank)
        try:
            self._server.spawn(rank, [*fds, theirs.fileno()])
        finally:
            theirs.close()

    def watch(self) -> None:
        """Go on until nobody is left."""
        while not self.state.over:
            deadline = self.state.deadline
            timeout = None if deadline is None else max(0.0, deadline - time.monotonic())
            for key, _ in self._selector.select(timeout):
                self._take_all(self._read(key))
            self._take_all([policy.DeadlinePassed()])

    def end_workers(self) -> None:
        """End everybody after a KeyboardInterrupt; a second one ends them at once."""
        try:
            self._take_all([policy.Interrupted(signal.SIGINT)])
            self.watch()
        except KeyboardInterrupt:
            self._act(policy.KillServer())

    def close(self) -> None:
        self._selector.close()
        self._memories.close()
        self._control.close()
        for channel in self._channels.values():
            channel.close()

    def _read(self, key: selectors.SelectorKey) -> list[policy.Event]:
        if key.fileobj is self._signals:
            assert self._signals is not None
            return [policy.Interrupted(signum) for signum in self._signals.recv(64)]
        if key.fileobj is self._server.channel:
            return self._read_server()
        return self._read_worker(key.data)

    def _read_server(self) -> list[policy.Event]:
        events: list[policy.Event] = []
        for message in self._server.channel.receive_ready():
            rank = message.header["rank"]
            # What a worker said before it left must be known before its leaving is judged.
            events += self._read_worker(rank)
            events.append(policy.Exited(rank, message.header["exit_code"]))
        if self._server.channel.at_end:
            for rank in sorted(self.state.alive):
                events += self._read_worker(rank)
            self._selector.unregister(self._server.channel)
            self.server_is_usable = False
            events.append(policy.ServerLost(self._server.wait()))
        return events

    def _read_worker(self, rank: int) -> list[policy.Event]:
        channel = self._channels.get(rank)
        was_at_end = channel is None or channel.at_end
        if channel is None or was_at_end:
            return []
        events: list[policy.Event] = []
        for message in channel.receive_ready():
            events += self._hear(rank, message)
        if channel.at_end:
            self._selector.unregister(channel)
        return events

    def _hear(self, rank: int, message: Message) -> list[policy.Event]:
        match message.header["type"]:
            case "memory":
                self._answer(rank, message.header["index"], message.header["num_bytes"])
            case "release":
                self._memories.release(rank, message.header["index"])
            case "done":
                self.results[rank] = message.payload
                return [policy.Done(rank)]
            case "failed":
                return [policy.Reported(_failure(rank, message))]
        return []

    def _answer(self, rank: int, index: int, num_bytes: int) -> None:
        try:
            fd = self._memories.request(rank, index, num_bytes)
        except (ValueError, OSError) as error:
            answer, fds = {"type": "refused", "reason": str(error)}, []
        else:
            answer, fds = {"type": "memory"}, [fd]
        try:
            self._channels[rank].send(answer, fds=fds)
        except ConnectionError:
            # The worker has died meanwhile; the server will say how.
            return

    def _take_all(self, events: Iterable[policy.Event]) -> None:
        for event in events:
            decision = policy.decide(self.state, event, time.monotonic())
            self.state = decision.state
            for action in decision.actions:
                self._act(action)

    def _act(self, action: policy.Action) -> None:
        match action:
            case policy.Leave(rank, how):
                self._control.leave(rank, how)
            case policy.SendSignal(ranks, signum):
                self._server.signal(ranks, signum)
            case policy.KillServer():
                self.server_is_usable = False
                self._server.kill()


def _failure(rank: int, message: Message) -> policy.Failure:
    return policy.Failure(
        rank=rank,
        exit_code=message.header["exit_code"],
        summary=message.header["summary"],
        traceback=message.header["traceback"],
        waited_for=message.header["waited_for"],
        exception=message.payload,
    )
