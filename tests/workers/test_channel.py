"""Messages arrive whole or not at all, with their descriptors."""

from __future__ import annotations

import os
import resource
import threading
from collections.abc import Iterator

import pytest
from tests.descriptors import none_stay_open

from unisono.runtime.checkpoint.slots import Places
from unisono.runtime.checkpoint.writer import SlotToWrite
from unisono.runtime.workers import channel as channel_module
from unisono.runtime.workers.channel import Channel
from unisono.runtime.workers.launcher_messages import (
    Begun,
    ForkWorker,
    Live,
    MemoryGranted,
    Message,
    NoRecovery,
    ProgramDone,
    Ready,
    ReplicatedResult,
    ShowProgress,
    WriteRequest,
)
from unisono.runtime.workers.membership import Membership

Pair = tuple[Channel, Channel]


@pytest.fixture
def pair() -> Iterator[Pair]:
    ends = Channel.pair()
    yield ends
    for end in ends:
        end.close()


def test_messages_arrive_in_order_and_whole(pair: Pair) -> None:
    left, right = pair
    sent: list[Message] = [
        NoRecovery("größer\udcff"),
        ReplicatedResult(1, "it", b"payload"),
        Begun(),
        ShowProgress({"loss": 0.5, "epoch": None}),
        Live(Membership((0, 2), leader=2, why="one was lost"), {"key": 1}, is_alone=False),
        WriteRequest(SlotToWrite(Places(1, 64, 0, (18, 34), 16, 8), 0, 3, "runs/1", 2), wait=True),
    ]
    for message in sent:
        left.send(message)
    assert [right.receive() for _ in sent] == sent
    for message in sent:
        left.send(message)
    assert right.receive_ready() == sent


@pytest.mark.parametrize("packet_bytes", [8, 1 << 15])  # of what goes without a memory of its own
def test_descriptors_go_with_their_own_message_and_close_on_exec(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, packet_bytes: int
) -> None:
    monkeypatch.setattr(channel_module, "_PACKET_BYTES", packet_bytes)
    left, right = pair
    memories = [os.memfd_create(f"test-{n}") for n in range(3)]
    for n, fd in enumerate(memories):
        os.write(fd, b"%d" % n)
    left.send(ForkWorker(0, 0, ()))
    left.send(ForkWorker(1, 0, tuple(memories[:2])))
    left.send(MemoryGranted((memories[2],) * 32))
    fds_of = [message.fds for message in right.receive_ready()]  # type: ignore[attr-defined]
    contents = [[os.pread(fd, 9, 0) for fd in fds] for fds in fds_of]
    assert contents == [[], [b"0", b"1"], [b"2"] * 32]
    assert not any(os.get_inheritable(fd) for fds in fds_of for fd in fds)
    for fd in [*memories, *(fd for fds in fds_of for fd in fds)]:
        os.close(fd)


def test_a_receiver_without_room_for_the_descriptors_is_told(pair: Pair) -> None:
    left, right = pair
    memory = os.memfd_create("test")
    left.send(MemoryGranted((memory, memory, memory)))
    left.send(Begun())
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest_free = os.dup(memory)
    os.close(lowest_free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest_free + 1, hard))
    try:
        with none_stay_open(), pytest.raises(OSError, match="Too many open files"):
            right.receive()
        assert right.receive() == Begun()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        os.close(memory)


@pytest.mark.parametrize("num_bytes", [32_000, 32_767, 32_768, 33_000, 1 << 23])
def test_a_message_of_any_length_arrives_at_once(pair: Pair, num_bytes: int) -> None:
    left, right = pair
    payload = os.urandom(num_bytes)
    with none_stay_open():
        left.send(ProgramDone(payload))  # nobody reads yet
        left.send(NoRecovery("x" * num_bytes))
        assert right.receive_ready() == [ProgramDone(payload), NoRecovery("x" * num_bytes)]


def test_one_who_sends_faster_than_is_read_waits(pair: Pair) -> None:
    left, right = pair
    sent = [ReplicatedResult(n, "it", bytes(30_000)) for n in range(100)]

    def send() -> None:
        for message in sent:
            left.send(message)

    sender = threading.Thread(target=send)
    sender.start()
    arrived = [right.receive() for _ in sent]
    sender.join()
    assert arrived == sent


def test_nothing_ready_means_an_empty_list_without_waiting(pair: Pair) -> None:
    assert pair[1].receive_ready() == []
    assert not pair[1].at_end


@pytest.mark.parametrize("waits", [True, False])
def test_what_was_sent_before_the_end_arrives_and_then_the_end(pair: Pair, waits: bool) -> None:
    left, right = pair
    right.send(Ready())  # is never read, which resets the connection
    left.send(Begun())
    left.send(Ready())
    left.close()
    if waits:
        assert [right.receive() for _ in range(3)] == [Begun(), Ready(), None]
    else:
        assert right.receive_ready() == [Begun(), Ready()]
        assert right.receive_ready() == []
    assert right.at_end


def test_an_end_that_left_messages_unread_is_a_connection_error_for_the_sender(pair: Pair) -> None:
    left, right = pair
    right.send(Begun())
    left.close()
    with pytest.raises(ConnectionError):
        right.send(Ready())
