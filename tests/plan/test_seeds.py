from hypothesis import given
from hypothesis import strategies as st

from unisono.plan.seeds import seed_of


def test_a_seed_never_changes_between_versions():
    assert seed_of("train", 0, 0, 0) == 14763814405083411875
    assert seed_of("train", 7, 812, 3) == 17660742953300139911


places = st.tuples(st.integers(0, 2**31), st.integers(0, 2**40), st.integers(0, 64))


@given(places, places)
def test_different_places_have_different_seeds(one, other):
    assert (seed_of("train", *one) == seed_of("train", *other)) == (one == other)


@given(places)
def test_streams_never_meet(place):
    assert seed_of("train", *place) != seed_of("evaluate", *place)


@given(places)
def test_a_seed_has_64_bits(place):
    assert 0 <= seed_of("train", *place) < 2**64
