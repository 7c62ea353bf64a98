from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from tests.threads import in_threads
from tests.workers.fake_launcher import Death, Job

from unisono.errors import MismatchError, PeerLostError
from unisono.runtime.workers.context import context, refuse_larger_group
from unisono.runtime.workers.external import ExternallyLaunched
from unisono.runtime.workers.meeting_point import Departure
from unisono.runtime.workers.team import Team
from unisono.runtime.world import World
from unisono.training.trainer import Trainer


@pytest.fixture
def teams(control_of):
    def make(world_size):
        control = control_of(world_size)
        worlds = [World(r, world_size, r, world_size) for r in range(world_size)]
        return [Team(ExternallyLaunched(world, control)) for world in worlds]

    return make


@pytest.mark.parametrize("num_bytes", [0, 1, 63_000, 64_512, 200_000])
def test_everybody_hears_everybody_whatever_the_length(teams, num_bytes):
    ours = teams(3)
    messages = [bytes([rank]) * (num_bytes // (rank + 1)) for rank in range(3)]
    assert (
        in_threads(3, lambda rank: ours[rank].gather(messages[rank], "test"))
        == [dict(enumerate(messages))] * 3
    )


def test_votes_are_heard_by_all_each_time(teams):
    ours = teams(3)

    def work(rank):
        heard = []
        for meeting in range(6):
            heard.append(ours[rank].vote(10 * meeting + rank, "vote"))
            if meeting % 2:
                assert ours[rank].meet("between")
        return heard

    expected = [{rank: 10 * meeting + rank for rank in range(3)} for meeting in range(6)]
    assert in_threads(3, work) == [expected] * 3


@pytest.mark.parametrize("moment", ["before", "after"])
def test_the_vote_of_a_lost_worker_is_heard_by_all_or_by_nobody(control_of, moment):
    def work(team):
        assert team.vote(1, "first") == dict.fromkeys(range(3), 1)
        heard = team.vote(2 + team.world.rank, "second")
        return heard, team.vote(9, "third")

    results = Job(control_of(3), [Death(1, 2, moment)]).run(work)
    second = None if moment == "before" else {0: 2, 1: 3, 2: 4}
    third = {0: 9, 2: 9} if moment == "before" else None
    assert results == dict.fromkeys((0, 2), (second, third))


def test_teams_agree_or_are_told_the_first_difference(teams):
    ours = teams(2)
    assert in_threads(2, lambda rank: ours[rank].agree({"`seed`": 1, "n": [1]})) == [None, None]
    errors = in_threads(2, lambda rank: ours[rank].agree({"`seed`": 1, "`batch_size`": 32 + rank}))
    for error in errors:
        assert isinstance(error, MismatchError)
        assert "`batch_size` must be the same" in str(error)
        assert "32 on rank 0 and 33 on rank 1" in str(error)


def test_the_end_is_not_awaited_of_a_host_that_cannot_be_reached():
    how = {0: Departure.PRESENT, 1: Departure.LOST, 2: Departure.UNREACHABLE}
    barrier = SimpleNamespace(departure=how.get, lose=refuse)
    team = SimpleNamespace(
        is_ended_by=None, membership=SimpleNamespace(ranks=(0, 1, 2)), _barrier=barrier
    )
    with pytest.raises(PeerLostError, match="rank 2"):
        Team.await_end(team)


def refuse(rank, how):
    raise PeerLostError(f"rank {rank} {how}", rank=rank)


def test_a_team_of_one_waits_for_nobody(monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    team = context().team()
    assert team.meet("alone")
    assert team.gather(b"alone", "alone") == {0: b"alone"}
    assert team.vote(3, "alone") == {0: 3}
    assert team.broadcast_from_leader(lambda: b"alone", "alone") == b"alone"
    assert len(team.memory(3, 100).mapping) == 100
    assert (team.is_leader, team.position, team.size) == (True, 0, 1)
    team.plan(5, 3)
    assert [team.planned(step) for step in (4, 5, 6)] == [0, 3, 0]
    team.pause()


@pytest.fixture
def group_of():
    """Let torch believe in a process group, whose ranks are all here."""

    def make(rank, world_size):
        from torch.testing._internal.distributed.fake_pg import FakeStore

        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)

    yield make
    if dist.is_initialized():
        dist.destroy_process_group()


def test_one_of_a_process_group_of_which_nobody_told_us_is_refused(group_of, monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    group_of(1, 2)
    model = torch.nn.Linear(1, 1)
    with pytest.raises(ValueError, match=r"has 2 \(this process is rank 1\)") as raised:
        Trainer(model, torch.optim.SGD(model.parameters(), lr=0.1), lambda model, batch: None)
    assert '`os.environ["RANK"] = "1"`' in str(raised.value)
    assert "unisono run -n 2" in str(raised.value)


@pytest.mark.parametrize(
    ("here", "group", "is_refused"),
    [
        (World(), None, False),
        (World(), (0, 1), False),
        (World(1, 2, 1, 2), (0, 1), False),  # each has one of its own
        (World(1, 2, 1, 2), (1, 2), False),
        (World(1, 2, 1, 2), (0, 2), False),  # in another order
        (World(0, 4, 0, 4), (1, 3), False),
        (World(), (0, 2), True),
        (World(1, 2, 1, 2), (3, 4), True),
    ],
)
def test_a_process_group_holds_at_most_the_workers(group_of, here, group, is_refused):
    if group is not None:
        group_of(*group)
    if is_refused:
        with pytest.raises(ValueError, match=f"WORLD_SIZE say {here.world_size}:"):
            refuse_larger_group(here)
    else:
        refuse_larger_group(here)
