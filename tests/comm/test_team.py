import pytest
from tests.comm.test_barrier import as_ranks, page_of  # noqa: F401

from unisono.comm.alone import Alone
from unisono.comm.team import Team
from unisono.errors import MismatchError
from unisono.world import World


@pytest.fixture
def teams(page_of):  # noqa: F811
    def make(world_size):
        page = page_of(world_size)
        worlds = [World(r, world_size, r, world_size) for r in range(world_size)]
        return [Team(world, page, Alone()) for world in worlds]

    return make


@pytest.mark.parametrize("num_bytes", [0, 1, 63_000, 64_512, 200_000])
def test_everybody_hears_everybody_whatever_the_length(teams, num_bytes):
    ours = teams(3)
    messages = [bytes([rank]) * (num_bytes // (rank + 1)) for rank in range(3)]
    assert (
        as_ranks(3, lambda rank: ours[rank].gather(messages[rank], "test"))
        == [dict(enumerate(messages))] * 3
    )


def test_teams_agree_or_are_told_the_first_difference(teams):
    ours = teams(2)
    assert as_ranks(2, lambda rank: ours[rank].agree({"`seed`": 1, "n": [1]})) == [None, None]
    errors = as_ranks(2, lambda rank: ours[rank].agree({"`seed`": 1, "`batch_size`": 32 + rank}))
    for error in errors:
        assert isinstance(error, MismatchError)
        assert "`batch_size` must be the same" in str(error)
        assert "32 on rank 0 and 33 on rank 1" in str(error)


def test_a_team_of_one_waits_for_nobody(monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    team = Team.from_environment()
    assert team.meet("alone")
    assert team.gather(b"alone", "alone") == {0: b"alone"}
    assert team.hear_lead(lambda: b"alone", "alone") == b"alone"
    assert team.memory(3, 100).num_bytes == 100
    assert (team.is_lead, team.position, team.size, team.is_launched) == (True, 0, 1, False)
    team.plan(5, 3)
    assert [team.planned(step) for step in (4, 5, 6)] == [0, 3, 0]
    team.pause()
    assert not team.is_asked_to_stop
