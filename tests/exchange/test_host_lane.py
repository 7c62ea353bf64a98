"""Frames between hosts: each goes where it is expected, whenever that is said; others break it."""

import random
import socket
import threading
from queue import Queue
from types import SimpleNamespace

import pytest
import torch
from tests.exchange.fake_hosts import HostsJob

from unisono.engine.exchange import host_lane
from unisono.engine.exchange import lanes as lanes_of_hosts
from unisono.engine.exchange.communicator import BrokenError
from unisono.engine.exchange.host_lane import HostLane, LaneTurn, connect_lane
from unisono.engine.exchange.lanes import Lanes
from unisono.engine.exchange.ready_buckets import ReadyBuckets
from unisono.runtime.workers import host_links


@pytest.fixture
def lanes():
    ours, theirs = socket.socketpair()
    for end in (ours, theirs):
        end.setblocking(False)
    made = [HostLane({1: ours}), HostLane({0: theirs})]
    yield made
    for lane in made:
        lane.close()


def views(*sizes, fill=0):
    return [memoryview(bytearray([fill + at]) * size) for at, size in enumerate(sizes)]


def test_frames_come_in_any_order_and_as_late_as_they_may(lanes):
    """More bytes than the kernel takes, expected one at a time in an order of its own."""
    draw, sizes = random.Random(3), dict.fromkeys(range(6), (7, 0, 1 << 18))
    swaps = [lanes[0].swap(n, {1: views(*sizes[n], fill=10 * n)}) for n in draw.sample(range(6), 6)]
    into = {number: views(*sizes[number]) for number in sizes}
    for number in draw.sample(range(6), 6):
        lanes[1].progress(0.001)
        lanes[1].expect(number, {0: into[number]})
        lanes[0].progress(0.001)
    empty = [lanes[1].swap(number, {}) for number in sizes]
    while not all(one.is_ready for one in (*swaps, *empty)):
        lanes[1].progress(0.001)
        lanes[0].progress(0.001)
    for number in sizes:
        assert into[number] == views(*sizes[number], fill=10 * number)


@pytest.mark.parametrize("size", [3, 5])
def test_a_frame_of_another_length_breaks_the_lane(lanes, size):
    lanes[1].expect(7, {0: views(4)})
    lanes[0].swap(7, {1: views(size)})
    with pytest.raises(BrokenError, match=f"must send 4 bytes as number 7, not {size}"):
        lanes[1].wait(lanes[1].swap(7, {}))


def test_a_lane_that_is_closed_is_told_to_the_other_end(lanes):
    lanes[1].expect(7, {0: views(4)})
    lanes[0].close()
    with pytest.raises(BrokenError, match="host 0 has closed its connection"):
        lanes[1].wait(lanes[1].swap(7, {}))


def test_whoever_waits_stops_when_another_thread_has_the_lane_left(lanes):
    lanes[1].expect(7, {0: views(4)})
    threading.Timer(0.01, lanes[1].leave).start()
    with pytest.raises(BrokenError, match="has left"):
        lanes[1].wait(lanes[1].swap(7, {}))


def test_a_send_to_a_worker_that_is_gone_ends_as_any_other_loss(lanes):
    """It is killed once it has sent its last sums, with some of ours unread."""
    lanes[0].close()
    failures = []
    between = SimpleNamespace(lane=lanes[1], _num_turns=0, _check=failures.append)
    Lanes._swap(between, {0: views(4)}, {})
    assert "Broken pipe" in failures[0]


def test_a_worker_that_is_stopped_within_its_turn_is_not_waited_for_forever(lanes, monkeypatch):
    """Its kernel answers, so it is not lost."""
    monkeypatch.setenv("UNISONO_MEETING_TIMEOUT", "0.1")
    monkeypatch.setattr(lanes_of_hosts, "_LOOK_EVERY_S", 0.01)
    failures = []
    team, pipeline = SimpleNamespace(has_lost=False), SimpleNamespace(failure="left")
    between = SimpleNamespace(lane=lanes[1], _num_turns=0, _check=failures.append, _team=team)
    Lanes._swap(between, {}, {0: views(4)})
    turn = threading.Thread(target=_until_it_is_left, args=lanes[1:])
    turn.error = None
    turn.start()
    between._turn, between._pipeline = turn, pipeline
    Lanes._end(between)
    assert ["within 0.1 s" in failure for failure in failures] == [True, True]


def _until_it_is_left(lane):
    with pytest.raises(BrokenError, match="has left"):
        while True:
            lane.progress(0.01)


def test_strangers_are_turned_away(control_of, monkeypatch):
    """Somebody connects first, with a wrong secret; the workers connect nevertheless."""
    turned_away = []
    call_it = host_links._call_rank

    def call(rank, place, secret, me, deadline):
        with socket.create_connection(place) as stranger:
            stranger.sendall(bytes([me, 0, 0, 0]) + b"x" * 32)
            turned_away.append(stranger.recv(1))
        return call_it(rank, place, secret, me, deadline)

    monkeypatch.setattr(host_links, "_call_rank", call)

    def work(team):
        lane = connect_lane(team, [0, 1])
        lane.expect(1, {1 - team.host: (into := views(3))})
        lane.wait(lane.swap(1, {1 - team.host: views(3, fill=5 + team.host)}))
        lane.close()
        return bytes(into[0])

    assert HostsJob(control_of(2)).run(work) == {0: b"\6" * 3, 1: b"\5" * 3}
    assert turned_away == [b""]


def ready_buckets(number=1):
    return ReadyBuckets([memoryview(bytearray(64))], 0, [(at,) for at in range(number)])


def test_a_bucket_leaves_as_soon_as_this_worker_has_come_to_it(monkeypatch, lanes):
    monkeypatch.setattr(host_lane, "_LOOK_AT_TURN_EVERY_S", 60.0)
    monkeypatch.setattr(host_lane, "_LOOK_EVERY_WHILE_IDLE_S", 60.0)
    sent, ready = Queue(), ready_buckets(2)

    class Pipeline:
        failure = ""

        def send(self, num_ready, lane):
            sent.put(num_ready)

        def finish(self, lane):
            sent.put("all")

    turn = LaneTurn(Pipeline(), lanes[0], ready, ready.count, 2)
    seen = [sent.get(timeout=10)]
    for index in (0, 1):
        ready.mark(index)
        seen.append(sent.get(timeout=10))
    turn.join()
    assert seen == [0, 1, "all"]
    lanes[0].close()
    ready.mark_all()
    lanes[0].wake()  # of no use any more


@pytest.mark.parametrize("flushes", [False, True])
def test_the_thread_of_a_turn_treats_tiny_numbers_as_the_worker_does(flushes):
    tiny, found = torch.tensor(1e-40), []

    class Pipeline:
        failure = ""

        def finish(self, lane):
            found.append((tiny * 1.0).item() == 0.0)

    before = (tiny * 1.0).item() == 0.0
    try:
        if not torch.set_flush_denormal(flushes):
            pytest.skip("this processor has no such mode")
        turn = LaneTurn(Pipeline(), HostLane({}), ready_buckets(), lambda: 1, 1)
        turn.join()
    finally:
        torch.set_flush_denormal(before)
    assert turn.error is None
    assert found == [flushes]
