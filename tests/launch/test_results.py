"""What comes back to the caller: values of the caller's own classes, which stay as they are."""

from __future__ import annotations

import enum
from typing import Any

import pytest

import unisono
from unisono.launch.exceptions import pack_exception, unpack_exception
from unisono.launch.results import pack_result, unpack_result


def through_result(value: Any) -> Any:
    return unpack_result(pack_result(value))


def through_exception(value: Any) -> Any:
    return unpack_exception(pack_exception(value))


@pytest.mark.parametrize(
    ("base", "through"), [(object, through_result), (Exception, through_exception)]
)
def test_a_class_of_the_callers_stays_as_it_is_when_a_value_of_it_comes_back(base, through):
    class Kept(base):
        rate = 1

        def tell(self):
            return through_result

    tell = Kept.tell
    for _ in range(2):
        found = through(Kept())
        assert type(found) is Kept
        assert Kept.tell is tell
        assert Kept.tell.__globals__ is globals()
    packed = pack_result(Kept())
    Kept.rate = 2
    assert unpack_result(packed).rate == 2


def test_members_of_the_callers_enums_are_the_callers():
    class Colour(enum.Enum):
        RED = 1

        def tell(self):
            return through_result

    assert through_result([Colour.RED])[0] is Colour.RED
    assert Colour.RED.tell.__func__.__globals__ is globals()


def test_classes_that_a_worker_has_made_come_whole():
    def make():
        class Made:
            rate = 3

            def tell(self):
                return self.rate * factor

        factor = unisono.world().rank + 1
        return Made(), [Made()]

    (first, others), (second, _) = unisono.launch(make, workers=2)
    assert (first.tell(), second.tell()) == (3, 6)
    assert type(first) is type(others[0]) is not type(second)
    assert type(through_result(first)) is type(first)
