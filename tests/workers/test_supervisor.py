"""Whoever started a worker answers it: our launcher, another one, or nobody."""

import contextlib
import os
import threading

import pytest
from tests.threads import in_threads

from unisono.errors import CheckpointError, MismatchError, UnisonoError
from unisono.runtime.checkpoint.slots import Places
from unisono.runtime.checkpoint.writer import SlotToWrite
from unisono.runtime.workers import context
from unisono.runtime.workers import launcher_messages as messages
from unisono.runtime.workers.channel import Channel
from unisono.runtime.workers.control_block import ControlBlock
from unisono.runtime.workers.external import ExternallyLaunched
from unisono.runtime.workers.meeting_point import Departure
from unisono.runtime.workers.membership import Membership
from unisono.runtime.workers.supervisor import (
    CONTROL_VARIABLE,
    INCARNATION_VARIABLE,
    LINK_VARIABLE,
    RECOVERS_VARIABLE,
    STORE_VARIABLE,
    LauncherLink,
    SingleProcess,
)
from unisono.runtime.world import World, per_process

KEPT = SlotToWrite(Places(1, 64, 0, (18, 34), 16, 8), 0, 3, "runs/1", 2)


@pytest.mark.parametrize("world_size", [1, 3])
def test_where_nobody_replaces_workers_everyone_continues(world_size):
    control = ControlBlock.create(world_size)
    alone = SingleProcess()
    other = ExternallyLaunched(World(0, world_size, 0, world_size), control)
    for supervisor in (other, alone):
        everyone = Membership.of(supervisor.world.world_size)
        supervisor.notify(messages.Ready())
        supervisor.show_wait("something")
        supervisor.poll()
        assert supervisor.stopped(3, between_steps=True) == everyone
        is_alone = supervisor is alone
        assert supervisor.catch_up(0, "it") == messages.Live(everyone, None, is_alone)
        assert not supervisor.can_replace
        # The process does it itself.
        assert not supervisor.write_checkpoint(KEPT, wait=True)
        assert not supervisor.lock_directory("runs/1")
    control.close()


class Launcher:
    """Plays the launcher of one worker: notes what it hears, and answers from a list."""

    def __init__(self, channel, *answers):
        self.heard = []
        self._channel, self._answers = channel, list(answers)
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self):
        while (message := self._channel.receive()) is not None:
            self.heard.append(message)
            if isinstance(message, messages.Request):
                if not self._answers:
                    break
                self._channel.send(self._answers.pop(0))
        self._channel.close()

    def join(self):
        self._thread.join()
        return self.heard


@pytest.fixture
def linked(monkeypatch):
    """Make a worker's link to a launcher that gives these answers."""
    made = []

    def make(*answers):
        ours, theirs = Channel.pair()
        control = ControlBlock.create(2)
        fds = [os.dup(theirs.fileno()), os.dup(control.fd), os.memfd_create("unisono-store")]
        names = (LINK_VARIABLE, CONTROL_VARIABLE, STORE_VARIABLE)
        names += (INCARNATION_VARIABLE, RECOVERS_VARIABLE)
        for name, value in zip(names, (*fds, 2, 1), strict=True):
            monkeypatch.setenv(name, str(value))
        for name, value in {"RANK": 1, "WORLD_SIZE": 2}.items():
            monkeypatch.setenv(name, str(value))
        theirs.close()
        control.close()
        link = LauncherLink()
        made.append((link, Launcher(ours, *answers)))
        return made[-1]

    yield make
    for link, launcher in made:
        link._channel.close()
        launcher.join()
        link.control.close()
        os.close(link.store_fd)


def gather(message, purpose):
    raise AssertionError("the launcher makes the memory")


@pytest.mark.parametrize(
    ("refusal", "error"),
    [
        (messages.Refused("no"), MismatchError),
        (messages.Refused("no", CheckpointError), CheckpointError),
    ],
)
def test_a_refusal_is_raised_as_the_error_that_it_is(linked, refusal, error):
    link, _ = linked(refusal)
    with pytest.raises(error, match="no") as raised:
        link.memory(1, 64, gather)
    assert type(raised.value) is error


def test_a_launcher_that_is_gone_is_named(linked):
    link, launcher = linked()
    for _ in range(2):  # it has ended before it answers; then before it is asked
        with pytest.raises(UnisonoError, match="a worker's launcher must outlive it"):
            link.lock_directory("runs/1")
        launcher.join()


def test_the_launcher_sees_what_its_worker_waits_for(linked):
    link, _ = linked()
    link.show_wait("rank 0 in `recv`" * 9)
    assert link.control.wait_of(1) == (1, (b"rank 0 in `recv`" * 9)[:124])
    link.show_wait("")
    assert link.control.wait_of(1) == (2, None)


def test_who_leaves_and_then_ends_has_not_died(monkeypatch):
    def leaves_and_ends(line):
        line.leave(Departure.FINISHED)
        return True

    control = ControlBlock.create(2)
    other = ExternallyLaunched(World(0, 2, 0, 2), control)
    monkeypatch.setattr(type(control.lines[1]), "has_died", property(leaves_and_ends))
    other.poll()
    assert control.departure(1) == Departure.FINISHED
    control.close()


def test_threads_that_ask_at_once_for_what_a_process_has_once_get_the_same():
    both = threading.Barrier(2, timeout=20)

    class Once:
        def __init__(self, name):
            both.wait()

    first, second = in_threads(2, lambda rank: per_process(Once, "at once"))
    assert first is second is per_process(Once, "at once")


def test_a_link_is_taken_over_once_whichever_threads_ask(monkeypatch):
    made, both = [], threading.Barrier(2)

    def link():
        with contextlib.suppress(threading.BrokenBarrierError):
            both.wait(0.2)
        made.append(object())
        return made[-1]

    monkeypatch.setattr(context, "_link", link)
    monkeypatch.setattr(context, "has_launcher", lambda: True)
    here = context.Context()
    first, second = in_threads(2, lambda rank: here.launcher)
    assert made == [first] == [second]
