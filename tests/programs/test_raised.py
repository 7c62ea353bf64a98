"""By which exception a loop is left is seen where its generator is closed."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator

import pytest

from unisono.errors import UnisonoError
from unisono.programs.live import takers_of
from unisono.programs.raised import raised_in


class LeftError(Exception):
    pass


def steps(seen: list[BaseException | None]) -> Iterator[int]:
    try:
        yield from range(9)
    except GeneratorExit:
        frame = sys._getframe(1)
        seen.append(raised_in([frame, *takers_of(frame)]))
        raise


def raises(step: int) -> None:
    raise LeftError(step)


def breaks(seen):
    for step in steps(seen):
        if step == 3:
            break


def returns(seen):
    for step in steps(seen):
        if step == 3:
            return step
    return None


def raises_in_the_loop(seen):
    for step in steps(seen):
        raise LeftError(step)


def raises_in_a_function(seen):
    for step in steps(seen):
        raises(step)


def raises_again(seen):
    for step in steps(seen):
        try:
            raises(step)
        except LeftError:
            raise


def raises_from_another(seen):
    for step in steps(seen):
        try:
            int("a")
        except ValueError as error:
            raise LeftError(step) from error


def raises_while_others_are_kept(seen):
    kept = None
    for step in steps(seen):
        if kept is not None:
            raise LeftError(step)
        try:
            int("a")
        except ValueError as error:
            kept = error


def raises_within_a_with(seen):
    for step in steps(seen):
        with contextlib.nullcontext():
            raises(step)


def raises_around_a_helper(seen):
    def watched():
        for step in steps(seen):
            yield step + 1

    for step in watched():
        raises(step)


def breaks_around_a_helper(seen):
    def watched():
        for step in steps(seen):
            yield step + 1

    for number, step in enumerate(watched()):
        if step + number > 3:
            break


def returns_in_a_helper_around_a_helper(seen):
    def watched():
        for step in steps(seen):
            yield step + 1

    def some():
        for step in watched():
            yield step
            if step == 3:
                return

    return [*some()]


NEVER_RAISED = [LeftError("never"), ValueError("never")]


@pytest.mark.parametrize(
    "leaves", [breaks, returns, breaks_around_a_helper, returns_in_a_helper_around_a_helper]
)
def test_a_loop_that_is_left_without_an_exception_has_none(leaves):
    seen = []
    leaves(seen)
    assert seen == [None]


@pytest.mark.parametrize("is_within", [False, True])
@pytest.mark.parametrize(
    "leaves",
    [
        raises_in_the_loop,
        raises_in_a_function,
        raises_again,
        raises_from_another,
        raises_while_others_are_kept,
        raises_around_a_helper,
        raises_within_a_with,
    ],
)
def test_the_exception_is_the_one_that_leaves(leaves, is_within):
    seen = []
    with contextlib.suppress(ValueError):
        raise NEVER_RAISED[1]
    try:
        if is_within:
            raise KeyError
        raise LookupError
    except LookupError:
        with pytest.raises(LeftError) as raised:
            leaves(seen)
    assert seen[0] is raised.value


def test_several_that_may_be_it_are_no_guess():
    seen = []

    def leaves():
        mine = LeftError("mine")
        for step in steps(seen):
            other = LeftError("other")
            assert other is not mine
            raises(step)

    with pytest.raises(LeftError):
        leaves()
    assert isinstance(seen[0], UnisonoError) or str(seen[0]) == "0"
