import pytest
from hypothesis import given
from hypothesis import strategies as st

from unisono.plan.shards import CUT_ELEMENTS, Piece, cut

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
def test_pieces_are_every_parameter_once_in_order(numels, workers):
    pieces = [piece for mine in cut(numels, workers) for piece in mine]
    ends = [0] * len(numels)
    for piece in pieces:
        assert ends[piece.index] == piece.start
        assert piece.stop > piece.start or numels[piece.index] == 0
        ends[piece.index] = piece.stop
    assert ends == numels
    assert pieces == sorted(pieces, key=lambda piece: (piece.index, piece.start))


@pytest.mark.slow
@given(sizes, st.integers(1, 9))
def test_cuts_keep_every_element_in_its_place_of_a_vector(numels, workers):
    for mine in cut(numels, workers):
        for piece in mine:
            assert piece.start % CUT_ELEMENTS == 0
            assert piece.stop % CUT_ELEMENTS == 0 or piece.stop == numels[piece.index]


@pytest.mark.slow
@given(sizes, st.integers(1, 9))
def test_workers_get_about_the_same(numels, workers):
    loads = [sum(p.stop - p.start for p in mine) for mine in cut(numels, workers)]
    assert max(loads) - min(loads) <= sum(numels) / workers + 2 * CUT_ELEMENTS
    assert max(loads) <= sum(numels) / workers + CUT_ELEMENTS * (len(numels) + 1)
