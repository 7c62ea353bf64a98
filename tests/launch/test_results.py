"""What comes back to the caller: values of the caller's own classes, which stay as they are."""

from __future__ import annotations

import sys
from typing import Any

import pytest

import unisono
from unisono.runtime.launch.call import pack_result, unpack_result
from unisono.runtime.launch.exceptions import pack_exception, unpack_exception


def through_result(value: Any) -> Any:
    return unpack_result(pack_result(value), rank=0)


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
    assert unpack_result(packed, rank=0).rate == 2


@pytest.mark.slow
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


@pytest.mark.slow
def test_a_result_of_a_class_that_only_workers_can_import_is_told(tmp_path):
    (tmp_path / "only_there.py").write_text("class Found:\n    pass\n")

    def find():
        sys.path.insert(0, str(tmp_path))
        import only_there

        return only_there.Found()

    with pytest.raises(TypeError, match="what worker 0 returned cannot be built here") as raised:
        unisono.launch(find, workers=2)
    assert "No module named 'only_there'" in str(raised.value)
    assert isinstance(raised.value.__cause__, ModuleNotFoundError)


@pytest.mark.slow
def test_an_exception_of_any_length_arrives():
    def fail():
        raise ValueError("x" * 40_000_000)

    with pytest.raises(ValueError, match="xxx") as raised:
        unisono.launch(fail, workers=1)
    assert len(str(raised.value)) == 40_000_000
    assert len(str(raised.value.__cause__)) < 300_000
