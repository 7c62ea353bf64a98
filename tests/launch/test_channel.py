"""Frames arrive whole or not at all, with their descriptors."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator

import pytest

from unisono.workers import channel as channel_module
from unisono.workers.channel import Channel

Pair = tuple[Channel, Channel]


@pytest.fixture
def pair() -> Iterator[Pair]:
    ends = Channel.pair()
    yield ends
    for end in ends:
        end.close()


def test_messages_arrive_in_order_and_whole(pair: Pair) -> None:
    left, right = pair
    left.send({"n": 1})
    left.send({"n": 2, "text": "größer\udcff"}, b"payload")
    first, second = right.receive(), right.receive()
    assert first is not None
    assert (first.header, first.payload, first.fds) == ({"n": 1}, b"", ())
    assert second is not None
    assert (second.header, second.payload) == ({"n": 2, "text": "größer\udcff"}, b"payload")


def test_descriptors_go_with_their_own_message_and_close_on_exec(pair: Pair) -> None:
    left, right = pair
    memories = [os.memfd_create(f"test-{n}") for n in range(3)]
    for n, fd in enumerate(memories):
        os.write(fd, b"%d" % n)
    left.send({"n": "none"})
    left.send({"n": "two"}, fds=memories[:2])
    left.send({"n": "one"}, fds=memories[2:])
    messages = right.receive_ready()
    contents = {m.header["n"]: [os.pread(fd, 9, 0) for fd in m.fds] for m in messages}
    assert contents == {"none": [], "two": [b"0", b"1"], "one": [b"2"]}
    assert not any(os.get_inheritable(fd) for m in messages for fd in m.fds)
    for fd in [*memories, *(fd for m in messages for fd in m.fds)]:
        os.close(fd)


def test_a_payload_larger_than_the_sockets_buffer_arrives(pair: Pair) -> None:
    left, right = pair
    payload = os.urandom(1 << 23)
    sender = threading.Thread(target=left.send, args=({"big": True}, payload))
    sender.start()
    message = right.receive()
    sender.join()
    assert message is not None
    assert message.payload == payload


def test_nothing_ready_means_an_empty_list_without_waiting(pair: Pair) -> None:
    assert pair[1].receive_ready() == []
    assert not pair[1].at_end


def test_a_partial_frame_waits_for_its_rest() -> None:
    ours, theirs = socket.socketpair()
    left, right = Channel.pair()
    left.send({"n": 1}, b"abc")
    with socket.socket(fileno=right.detach()) as tap:
        frame = tap.recv(1 << 16)
    receiver = Channel(theirs)
    for position in range(len(frame) - 1):
        ours.send(frame[position : position + 1])
        assert receiver.receive_ready() == []
    ours.send(frame[-1:])
    assert [m.payload for m in receiver.receive_ready()] == [b"abc"]
    ours.close()
    left.close()
    receiver.close()


def test_the_end_between_two_frames_is_none(pair: Pair) -> None:
    left, right = pair
    left.send({"last": True})
    left.close()
    assert right.receive() is not None
    assert right.receive() is None
    assert right.at_end


def test_the_end_inside_a_frame_is_an_error_when_waiting_and_dropped_when_not() -> None:
    for wait in (True, False):
        ours, theirs = socket.socketpair()
        receiver = Channel(theirs)
        ours.send(b"\0\0\0\5")
        ours.close()
        if wait:
            with pytest.raises(ConnectionError, match="the sender left after 4 bytes"):
                receiver.receive()
        else:
            assert receiver.receive_ready() == []
            assert receiver.at_end
        receiver.close()


def test_an_end_that_left_frames_unread_is_a_connection_error_for_the_sender(pair: Pair) -> None:
    left, right = pair
    right.send({"never": "read"})
    left.close()
    with pytest.raises(ConnectionError):
        right.send({"too": "late"})


def test_sizes_beyond_the_limits_are_refused_on_both_sides(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    left, right = pair
    left.send({}, b"12345")
    monkeypatch.setattr(channel_module, "MAX_PAYLOAD_BYTES", 4)
    with pytest.raises(ValueError, match="at most 4 payload bytes, but has 5"):
        left.send({}, b"12345")
    with pytest.raises(ValueError, match="at most 4 payload bytes, but has 5"):
        right.receive()
