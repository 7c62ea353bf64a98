"""Where a program goes when it leaves a loop: to where the loop ends, or elsewhere."""

import contextlib
import sys

import pytest

from unisono.programs.live import goes_elsewhere


def steps(seen):
    try:
        yield from range(9)
    except GeneratorExit:
        seen.append(goes_elsewhere(sys._getframe(1)))
        raise


def breaks(seen):
    for step in steps(seen):
        if step == 2:
            break


def breaks_behind_a_call(seen):
    for step in steps(seen):
        if step == 2:
            print(end="")
            break


def breaks_and_goes_on(seen):
    for step in steps(seen):
        if step == 2:
            break
    more = 3 if seen else 4
    for each in range(more):
        more += each
    return more


def breaks_behind_a_return(seen):
    for step in steps(seen):
        if step == 2:
            break
        if step > 7:
            return 3
    return 4


def breaks_within_another_loop(seen):
    for _ in range(2):
        for step in steps(seen):
            for shard in range(2):
                if shard:
                    break
            if step == 2:
                break


def breaks_within_a_with(seen):
    with contextlib.nullcontext():
        for step in steps(seen):
            with contextlib.nullcontext():
                if step == 2:
                    break
        print(end="")
    return seen


def breaks_within_a_try(seen):
    try:
        for step in steps(seen):
            try:
                if step == 2:
                    break
            finally:
                seen = list(seen)
    except ValueError:
        pass
    return 2 if seen else None


def returns_what_the_end_returns(seen):
    total = 0
    for step in steps(seen):
        for shard in range(2):
            total += shard
            if step == 2:
                return total
    return total


def returns_nothing_as_the_end_does(seen):
    for step in steps(seen):
        if step == 2:
            return


def returns_a_value(seen):
    for step in steps(seen):
        if step == 2:
            return "early"
    return "late"


def returns_what_it_computes(seen):
    for step in steps(seen):
        if step == 2:
            return 5 if seen else step + 1
    return None


def returns_before_more_is_done(seen):
    for step in steps(seen):
        if step == 2:
            return
    print(end="")


def returns_from_two_loops(seen):
    for _ in range(2):
        for step in steps(seen):
            for shard in range(2):
                if step == 2:
                    return shard
    return None


def returns_within_a_with(seen):
    with contextlib.nullcontext():
        for step in steps(seen):
            if step == 2:
                return 7
    return None


def breaks_past_an_else(seen):
    for step in steps(seen):
        if step == 2:
            break
    else:
        return 4
    return 5


def breaks_past_an_else_that_continues(seen):
    for _ in range(2):
        for step in steps(seen):
            if step == 2:
                break
        else:
            continue
        break


TO_THE_END = [
    breaks,
    breaks_behind_a_call,
    breaks_and_goes_on,
    breaks_behind_a_return,
    breaks_within_another_loop,
    breaks_within_a_with,
    breaks_within_a_try,
    returns_what_the_end_returns,
    returns_nothing_as_the_end_does,
]
ELSEWHERE = [
    returns_a_value,
    returns_what_it_computes,
    returns_before_more_is_done,
    returns_from_two_loops,
    returns_within_a_with,
    breaks_past_an_else,
    breaks_past_an_else_that_continues,
]


@pytest.mark.parametrize("leaves", TO_THE_END)
def test_who_comes_to_where_a_loop_ends_leaves_it_as_if_no_step_was_left(leaves):
    seen = []
    leaves(seen)
    assert seen
    assert not any(seen)


@pytest.mark.parametrize("leaves", ELSEWHERE)
def test_a_return_and_a_break_past_an_else_go_elsewhere(leaves):
    seen = []
    leaves(seen)
    assert seen == [True]
