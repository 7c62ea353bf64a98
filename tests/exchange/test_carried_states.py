"""What two workers know of the values that shards hand from batch to batch, through one memory."""

import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from unisono import device
from unisono.exchange.carried_states import CarriedStates
from unisono.workers.memory import Memory

SHARDS = 3


def two_workers():
    """Bind two workers' states to one memory."""
    both = [CarriedStates(SHARDS) for _ in range(2)]
    memories = []

    def memory(key, num_bytes):
        memories.append(memories[0] if memories else Memory.private(1 << 20))
        return memories[-1]

    team = SimpleNamespace(supervisor=SimpleNamespace(is_alone=False), memory=memory)
    for states in both:
        states._place_bytes = 4096
        states.bind(team, 0)
    return both


def step(states, number, values, *, is_new=False):
    """Compute some shards, which get these values; gives those that they started with."""
    states.begin(number, is_new=is_new)
    started = {}
    for shard, value in values.items():
        states.start(shard, device.host())
        started[shard] = states.value
        states.value = value
    states.publish()
    return started


def test_whoever_takes_over_a_shard_has_its_value_though_the_lost_one_has_published_the_next():
    ours, theirs = two_workers()
    assert step(ours, 0, {0: "a0"}, is_new=True) == {0: None}
    assert step(theirs, 0, {1: "b0", 2: "c0"}, is_new=True) == {1: None, 2: None}
    for states in (ours, theirs):
        states.commit()
    step(theirs, 1, {1: "b1", 2: "lost"})
    assert step(ours, 1, {0: "a1", 1: "b1", 2: "c1"}) == {0: "a0", 1: "b0", 2: "c0"}
    ours.commit()
    assert step(ours, 2, {2: "c2"}) == {2: "c1"}


@pytest.mark.parametrize(
    "value",
    [
        None,
        (torch.randn(2, 3), {"length": 3, "mean": 0.1}, ["text", True]),
        torch.randn(4, 6).T,
        torch.randn(3, 8)[:, ::2],
        torch.tensor(2, dtype=torch.bfloat16),
        torch.empty(0, 3),
    ],
)
def test_values_are_the_same_here_and_there(value):
    ours, theirs = two_workers()
    step(ours, 0, {0: value}, is_new=True)
    ours.commit()
    theirs.begin(1, is_new=False)
    for states in (ours, theirs):
        states.begin(1, is_new=False)
        states.start(0, device.host())
    here, there = ours.value, theirs.value
    assert repr(here) == repr(there) == repr(value)
    if isinstance(value, torch.Tensor):
        assert here.stride() == there.stride() == value.clone().stride()
        assert not here.data_ptr() % 64
        assert not there.data_ptr() % 64


def test_states_travel_as_those_of_other_objects():
    ours, theirs = two_workers()
    step(ours, 4, {0: "a"}, is_new=True)
    step(theirs, 4, {1: torch.ones(2), 2: ("c",)}, is_new=True)
    for states in (ours, theirs):
        states.commit()
    kept = ours.state_dict()
    assert kept["step"] == 5
    ours.begin(7, is_new=True)
    again = CarriedStates(SHARDS)
    for states in (ours, again):
        states.load_state_dict(kept)
        assert repr(step(states, 5, dict.fromkeys(range(3)))) == (
            "{0: 'a', 1: tensor([1., 1.]), 2: ('c',)}"
        )


def test_values_of_a_loop_that_has_ended_stay():
    ours, theirs = two_workers()
    step(theirs, 0, {1: "b"}, is_new=True)
    step(ours, 0, {0: "a"}, is_new=True)
    ours.commit()
    ours.unbind()
    assert step(ours, 1, {0: 0, 1: 0, 2: 0}) == {0: "a", 1: "b", 2: None}


class Lane:
    """Brings bytes between two hosts, whose only workers are threads."""

    def __init__(self):
        self.views, self.met, self.sent = [None, None], threading.Barrier(2, timeout=30), 0

    def bring(self, host, of_host):
        self.views[host] = of_host
        self.met.wait()
        ours, theirs = self.views[host][1 - host], self.views[1 - host][1 - host]
        for into, source in zip(ours, theirs, strict=True):
            into[:] = source
            self.sent += len(source)
        self.met.wait()


def two_hosts(lane):
    """Bind the states of a worker on each of two hosts; gives them, each with how to collect."""
    said, met = {}, threading.Barrier(2, timeout=30)

    def gather(host, message, purpose):
        said[host] = message
        met.wait()
        heard = dict(said)
        met.wait()
        return heard

    both = []
    for host in range(2):
        team = SimpleNamespace(
            supervisor=SimpleNamespace(is_alone=False),
            memory=lambda key, num_bytes: Memory.private(1 << 20),
            hosts=((0,), (1,)),
            leads_host=True,
            gather=partial(gather, host),
        )
        states = CarriedStates(SHARDS)
        states._place_bytes = 4096
        states.bind(team, 0)
        both.append((states, partial(states.collect, team, partial(lane.bring, host))))
    return both


def on_both(*calls):
    with ThreadPoolExecutor(2) as pool:
        for done in [pool.submit(call) for call in calls]:
            done.result()


def test_each_host_gets_the_values_of_the_others_when_they_are_collected():
    lane = Lane()
    (ours, collect), (theirs, collect_there) = two_hosts(lane)
    on_both(collect, collect_there)  # nobody has any
    for number in range(3):
        step(ours, number, {0: torch.full((2,), number)}, is_new=not number)
        step(theirs, number, {1: f"b{number}", 2: [number]}, is_new=not number)
        ours.commit()
        theirs.commit()
    assert ours.state_dict()["values"][1] is None
    assert not lane.sent
    on_both(collect, collect_there)
    expected = "{'step': 3, 'values': [tensor([2, 2]), 'b2', [2]]}"
    assert repr(ours.state_dict()) == repr(theirs.state_dict()) == expected
    sent = lane.sent
    assert sent
    on_both(collect, collect_there)  # all have all
    assert lane.sent == sent
    # The shards are others' now.
    assert repr(step(ours, 3, {1: 0, 2: 0})) == "{1: 'b2', 2: [2]}"


def test_hosts_exchange_what_a_loop_has_left_before_the_next_one():
    lane = Lane()
    (ours, collect), (theirs, collect_there) = two_hosts(lane)
    step(ours, 0, {0: "a"}, is_new=True)
    step(theirs, 0, {1: "b", 2: "c"}, is_new=True)
    for states in (ours, theirs):
        states.commit()
        states.unbind()
        states._memory = Memory.private(1 << 20)  # of the next one
    on_both(collect, collect_there)
    assert ours.state_dict() == theirs.state_dict() == {"step": 1, "values": ["a", "b", "c"]}


def test_what_does_not_fit_is_refused():
    ours, _ = two_workers()
    with pytest.raises(ValueError, match=r"must fit 4,096 bytes, but that of shard 1 takes \d"):
        step(ours, 0, {1: torch.ones(4096)}, is_new=True)
