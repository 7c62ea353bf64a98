"""Frames that are kept: a generator that is closed drops its iterators nevertheless."""

import sys

import pytest

from unisono.programs.frames import frame_of, kept_frame

closed = []


def steps():
    try:
        yield
    finally:
        closed.append("steps")


def taken():
    for _ in steps():
        yield sys._getframe()


@pytest.mark.parametrize("how", ["close", "drop"])
def test_a_kept_frame_does_not_keep_what_its_generator_iterates_over(how):
    closed.clear()
    generator = taken()
    kept = kept_frame(next(generator))
    is_same = kept_frame(generator.gi_frame) is kept and frame_of(kept) is generator.gi_frame
    assert is_same
    assert kept.f_code.co_name == "taken"
    if how == "close":
        generator.close()
    del generator
    assert closed == ["steps"]


def test_a_frame_of_a_function_is_kept_itself():
    frame = sys._getframe()
    assert kept_frame(frame) is frame is frame_of(frame)


@pytest.mark.skipif(sys.version_info < (3, 14), reason="frames know their generators since 3.14")
def test_the_frame_of_a_generator_that_has_ended_is_named():
    generator = taken()
    kept = kept_frame(next(generator))
    generator.close()
    assert frame_of(kept) is None
    with pytest.raises(RuntimeError, match="has ended, and has no `f_locals`"):
        _ = kept.f_locals
