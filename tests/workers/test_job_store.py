"""Where the store of a job is, who is on which host, and what listens for it."""

import contextlib
import socket
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from tests.promises import promise
from tests.train.elsewhere import listening
from tests.workers.forked import Job

from unisono.runtime.workers.context import context
from unisono.runtime.workers.job_store import is_at_master
from unisono.runtime.workers.rendezvous import RankPlaces
from unisono.runtime.world import World

HAND, AGENT = "somebody", {"TORCHELASTIC_USE_AGENT_STORE": "True"}
AT = {"MASTER_ADDR": "node1", "MASTER_PORT": "29500"}
HERE = {"MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}


@pytest.mark.parametrize(
    ("environ", "started_by", "num_here", "expected"),
    [
        ({}, HAND, 4, False),
        (HERE, HAND, 4, False),
        (AT, HAND, 4, True),  # containers of one process each say no more
        ({**AT, "LOCAL_WORLD_SIZE": "4"}, HAND, 4, False),
        ({**AT, "LOCAL_WORLD_SIZE": "2"}, HAND, 2, True),
        (AT, "Slurm", 4, False),
        (AT, "Slurm", 2, True),
        ({"MASTER_PORT": "1"}, "Open MPI", 4, False),
        ({**HERE, **AGENT, "LOCAL_WORLD_SIZE": "4"}, "torchrun", 4, True),
        ({**HERE, "LOCAL_WORLD_SIZE": "4"}, "torchrun", 4, False),
    ],
)
def test_a_port_is_used_only_where_it_is_there_or_hosts_may_differ(
    environ, started_by, num_here, expected
):
    assert is_at_master(environ, World(0, 4, 0, num_here, started_by)) is expected


@pytest.mark.parametrize(
    ("environ", "num_here", "words"),
    [({"MASTER_PORT": "1"}, 4, "only MASTER_PORT is"), ({}, 2, r"several hosts \(2 of 4 on this")],
)
def test_half_of_what_is_needed_is_refused(environ, num_here, words):
    with pytest.raises(ValueError, match=words):
        is_at_master(environ, World(0, 4, 0, num_here, HAND))


def test_ranks_are_sorted_by_their_hosts():
    places = RankPlaces.of(3, ["b", "a", "b", "a", "a"])
    assert places.ranks_of_host == ((0, 2), (1, 3, 4))
    assert places.local_ranks == (1, 3, 4)
    assert places.world_size == 5


def address_of(socket_row):
    """Tell at which address and port a socket listens, as the kernel's table says it."""
    table, inode = socket_row.split()
    rows = map(str.split, Path(f"/proc/self/net/{table}").read_text().splitlines()[1:])
    return next(row[1].split(":")[0] for row in rows if row[9] == inode)


@promise("open-ports.4")
@pytest.mark.slow
def test_rank_0_listens_at_the_address_that_was_named_alone_and_shares_it_with_torch():
    def work(rank):
        inherited = listening()
        places = context().rendezvous().places
        listens = [address_of(row) for row in listening() if row not in inherited]
        said = context().rendezvous().gather("what", rank)
        dist.init_process_group("gloo")  # env:// at the same port
        total = torch.ones(1)
        dist.all_reduce(total)
        dist.destroy_process_group()
        team = context().team()
        return listens, places.ranks_of_host, said, total.item(), team.size

    with contextlib.closing(socket.create_server(("127.0.0.2", 0))) as free:
        port = free.getsockname()[1]
    job = Job({"MASTER_ADDR": "127.0.0.2", "MASTER_PORT": str(port)})
    said = job.run(work, 2)
    for rank, one in enumerate(said):
        listens = ["0200007F"] if rank == 0 else []  # 127.0.0.2, not 0.0.0.0
        assert one.value == [listens, [[0, 1]], [0, 1], 2.0, 2], said


@pytest.mark.slow
def test_where_nobody_listens_rank_0_is_missed():
    place = {"MASTER_ADDR": "127.0.0.2", "MASTER_PORT": "1", "UNISONO_RENDEZVOUS_TIMEOUT": "0.2"}
    said = Job(place).start(lambda: context().team(), 1, 2).end()
    assert said.error == "WaitTimeoutError"
    assert "127.0.0.2:1 cannot be reached" in said.text
