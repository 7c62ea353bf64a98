from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from unisono.plan.shards import (
    CUT_ELEMENTS,
    Piece,
    assign,
    cut,
    default_shards,
    parts_of_hosts,
    take_over,
)


@pytest.mark.parametrize(
    ("shards", "workers", "expected"),
    [
        (1, 1, [range(1)]),
        (4, 4, [range(1), range(1, 2), range(2, 3), range(3, 4)]),
        (8, 3, [range(3), range(3, 6), range(6, 8)]),
        (8, 1, [range(8)]),
        (7, 2, [range(4), range(4, 7)]),
    ],
)
def test_shards_are_divided_in_rank_order(shards, workers, expected):
    assert assign(shards, workers) == expected


@pytest.mark.parametrize(
    ("batch_size", "shards"),
    [(1, 1), (8, 1), (15, 1), (16, 2), (31, 2), (32, 4), (63, 4), (64, 8), (65, 8), (4096, 8)],
)
def test_the_default_is_a_power_of_two_with_eight_samples_a_shard(batch_size, shards):
    assert default_shards(batch_size) == shards


@settings(deadline=None)
@given(st.integers(1, 64).flatmap(lambda s: st.tuples(st.just(s), st.integers(1, s))))
def test_every_shard_has_one_worker_and_sizes_differ_by_at_most_one(case):
    shards, workers = case
    ranges = assign(shards, workers)
    assert [shard for part in ranges for shard in part] == list(range(shards))
    assert max(map(len, ranges)) - min(map(len, ranges)) <= 1


def test_more_workers_than_shards_are_refused_with_the_remedy():
    with pytest.raises(
        ValueError, match=r"`shards` must be at least the number of workers \(4\), but is 2: pass"
    ):
        assign(2, 4)


def test_no_worker_is_refused():
    with pytest.raises(ValueError, match="at least 1, but is 0"):
        assign(3, 0)


@pytest.mark.parametrize(
    ("held", "ranks", "new"),
    [
        # nobody was lost
        ({0: [range(2)], 1: [range(2, 4)]}, (0, 1), {0: [], 1: []}),
        # the last one takes all
        ({0: [range(2)], 1: [range(2, 4)]}, (1,), {1: [range(2)]}),
        # the run of a lost one is divided in rank order
        (
            {0: [range(2)], 1: [range(2, 4)], 2: [range(4, 6)]},
            (0, 2),
            {0: [range(2, 3)], 2: [range(3, 4)]},
        ),
        # one shard for two: the last in rank order has it
        ({0: [range(1)], 1: [range(1, 2)], 2: [range(2, 3)]}, (0, 1), {0: [], 1: [range(2, 3)]}),
        # two are lost: runs that touch are joined, others are not
        (
            {0: [range(2)], 1: [range(2, 4)], 2: [range(4, 6)], 3: [range(6, 8)]},
            (0,),
            {0: [range(2, 8)]},
        ),
        (
            {0: [range(2)], 1: [range(2, 4)], 2: [range(4, 6)]},
            (1,),
            {1: [range(2), range(4, 6)]},
        ),
        # what was taken over is taken over again
        (
            {0: [range(2), range(4, 5)], 1: [range(2, 4), range(5, 6)]},
            (1,),
            {1: [range(2), range(4, 5)]},
        ),
    ],
)
def test_what_lost_workers_held_is_divided_among_those_left(held, ranks, new):
    after, seen = take_over(held, ranks)
    assert seen == new
    assert after == {rank: [*held[rank], *new[rank]] for rank in ranks}


@st.composite
def losses(draw):
    """Shards, workers, and those who are left after each of some losses in one step."""
    num_shards = draw(st.integers(1, 40))
    ranks = sorted(draw(st.sets(st.integers(0, 50), min_size=1, max_size=min(num_shards, 12))))
    left = [tuple(ranks)]
    while len(left[-1]) > 1 and draw(st.booleans()):
        lost = draw(st.sets(st.sampled_from(left[-1]), max_size=len(left[-1]) - 1))
        left.append(tuple(rank for rank in left[-1] if rank not in lost))
    return num_shards, left


def shards_in(runs):
    return [shard for run in runs for shard in run]


@pytest.mark.slow
@settings(deadline=None)
@given(losses())
def test_after_any_losses_shards_are_held_once_and_evenly_and_what_survivors_held_is_unchanged(
    case,
):
    num_shards, (ranks, *lefts) = case
    parts = zip(ranks, assign(num_shards, len(ranks)), strict=True)
    held = {rank: [part] for rank, part in parts}
    for left in lefts:
        before = held
        held, new = take_over(before, left)
        # The order in which ranks are listed does not matter.
        assert (held, new) == take_over(dict(reversed(before.items())), left)
        assert tuple(held) == tuple(new) == left
        of_all = [shard for runs in held.values() for shard in shards_in(runs)]
        assert sorted(of_all) == list(range(num_shards))
        assert all(held[rank] == [*before[rank], *new[rank]] for rank in left)
        in_rank_order = [shard for rank in left for shard in shards_in(new[rank])]
        assert in_rank_order == sorted(in_rank_order)
        for runs in new.values():
            assert all(len(run) > 0 for run in runs)
            assert all(one.stop < other.start for one, other in pairwise(runs))
        sizes = [len(shards_in(runs)) for runs in new.values()]
        assert max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize(
    ("num_shards", "workers", "parts"),
    [
        (8, [2, 2], [1, 1]),
        (8, [1, 1, 1, 1], [1, 1, 1, 1]),
        (6, [1, 1], [2, 2]),
        (8, [1, 1, 1], [2, 2, 1]),
        (12, [1, 1, 1], [1, 1, 1]),
        (8, [1, 3], [1, 2]),
        (4, [4], [1]),
    ],
)
def test_parts_of_a_host_follow_from_its_shards(num_shards, workers, parts):
    assert parts_of_hosts(num_shards, workers) == parts


sizes = st.lists(st.integers(0, 20_000), max_size=12)


@pytest.mark.parametrize(
    ("numels", "workers", "expected"),
    [
        ([], 2, [[], []]),
        ([10], 2, [[Piece(0, 0, 10)], []]),
        ([4096], 2, [[Piece(0, 0, 2048)], [Piece(0, 2048, 4096)]]),
        ([0], 1, [[Piece(0, 0, 0)]]),
        ([1000, 3000], 2, [[Piece(0, 0, 1000), Piece(1, 0, 1024)], [Piece(1, 1024, 3000)]]),
    ],
)
def test_parameters_are_cut_for_workers(numels, workers, expected):
    assert cut(numels, workers) == expected


@given(sizes, st.integers(1, 9))
def test_pieces_are_all_parameters_once_of_whole_vectors_and_fair(numels, workers):
    pieces = [piece for mine in cut(numels, workers) for piece in mine]
    ends = [0] * len(numels)
    for piece in pieces:
        assert ends[piece.index] == piece.start
        assert piece.stop > piece.start or numels[piece.index] == 0
        ends[piece.index] = piece.stop
        assert piece.start % CUT_ELEMENTS == 0
        assert piece.stop % CUT_ELEMENTS == 0 or piece.stop == numels[piece.index]
    assert ends == numels
    assert pieces == sorted(pieces, key=lambda piece: (piece.index, piece.start))
    loads = [sum(p.stop - p.start for p in mine) for mine in cut(numels, workers)]
    assert max(loads) - min(loads) <= sum(numels) / workers + 2 * CUT_ELEMENTS
    assert max(loads) <= sum(numels) / workers + CUT_ELEMENTS * (len(numels) + 1)
