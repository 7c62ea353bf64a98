"""How ranks find each other, also where an earlier run has left something in the store."""

import json
import mmap
import os
import socket
import subprocess
import sys
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from unisono.errors import RendezvousError
from unisono.runtime.c10d import group_member
from unisono.runtime.c10d.group_memory import Layout
from unisono.runtime.procfs import host_name


def joined(store, rank, world_size, timeout_s):
    with group_member.shared_memory(store, rank, world_size, timeout_s) as memory:
        return memory


def total(group, rank):
    tensor = torch.tensor([rank + 1.0])
    group.allreduce(tensor)
    return tensor.item()


def ended_process():
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


def left_over(host="", pid=0):
    return json.dumps([host or host_name(), pid or os.getpid(), 0, "unisono-c10d-0"])


def test_what_earlier_groups_left_in_a_store_is_waited_out(as_ranks):
    store = dist.HashStore()
    for entry in (left_over(pid=ended_process()), left_over(), left_over(host="elsewhere")):
        store.set("unisono", entry)
        for _ in range(2):
            assert as_ranks(3, total, store_of=lambda rank: store) == [6, 6, 6]


@pytest.mark.parametrize(
    ("entry", "reason"),
    [
        ({"pid": 2**22 + 1}, "No such file"),
        ({}, "is not the expected memory"),
        ({"host": "elsewhere"}, "processes of one host only"),
    ],
)
def test_a_left_over_that_nobody_replaces_is_explained(entry, reason):
    store = dist.HashStore()
    store.set("unisono", left_over(**entry))
    with pytest.raises(RendezvousError, match=reason):
        joined(store, 1, 2, timeout_s=0.05)


def test_the_memory_of_an_earlier_group_is_not_taken_for_this_ones():
    store = dist.HashStore()
    with group_member.shared_memory(store, 0, 2, timeout_s=1) as memory:
        entry = json.loads(store.get("unisono"))
        store.set("unisono", json.dumps([*entry[:3], "unisono-c10d-another"]))
        with pytest.raises(RendezvousError, match="is not the expected memory"):
            joined(store, 1, 2, timeout_s=0.05)
        store.set("unisono", json.dumps(entry))
        with pytest.raises(RendezvousError, match="is memory of another size"):
            joined(store, 1, 3, timeout_s=0.05)
        memory.words[memory.layout.line(1) // 4 + 2] = 1
        with pytest.raises(RendezvousError, match="a rank 1 has already come"):
            joined(store, 1, 2, timeout_s=0.05)


def test_a_tcp_store_serves_as_well(as_ranks):
    listening = socket.create_server(("127.0.0.1", 0))
    port = listening.getsockname()[1]
    limit = timedelta(seconds=20)
    server = dist.TCPStore(
        "127.0.0.1",
        port,
        is_master=True,
        timeout=limit,
        wait_for_workers=False,
        master_listen_fd=listening.detach(),
    )

    def client(rank):
        return dist.TCPStore("127.0.0.1", port, is_master=False, timeout=limit)

    assert as_ranks(3, total, store_of=client) == [6, 6, 6]
    assert as_ranks(2, total, store_of=client) == [3, 3]
    assert server.check(["unisono"])


def test_a_rank_0_that_never_comes_is_missed_in_words():
    with pytest.raises(RendezvousError, match="rank 0 must publish"):
        joined(dist.HashStore(), 1, 2, timeout_s=0.05)


@pytest.mark.parametrize("world_size", [2, 16, 128])
def test_a_program_may_have_a_hundred_groups_on_a_large_machine(world_size, monkeypatch):
    real = os.sysconf
    pages = {"SC_PHYS_PAGES": (2 << 40) // mmap.PAGESIZE}
    monkeypatch.setattr(os, "sysconf", lambda name: pages.get(name) or real(name))
    assert 100 * Layout.for_this_machine(world_size).num_bytes < 2**47


@pytest.mark.parametrize("world_size", [1, 2, 3, 8])
def test_nothing_overlaps_in_the_layout(world_size):
    layout = Layout.for_this_machine(world_size)
    ranks = range(world_size)
    starts = [
        *(layout.line(rank) for rank in ranks),
        *(layout.ring(source, destination) for source in ranks for destination in ranks),
        *(layout.slot(rank, parity) for rank in ranks for parity in (0, 1)),
        *(layout.heap(rank).start for rank in ranks),
        layout.num_bytes,
    ]
    assert starts[0] == 0
    assert starts == sorted(set(starts))
    assert all(start % 64 == 0 for start in starts)
