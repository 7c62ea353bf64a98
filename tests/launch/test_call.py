"""What travels to workers, and how what cannot travel is named."""

from __future__ import annotations

import functools
import inspect
import linecache
import threading
from typing import Any

import pytest

import unisono
from unisono.launch.call import pack_call, sources_without_files
from unisono.launch.culprit import way_to_culprit

LOCK = threading.Lock()


class Holder:
    def __init__(self, held: Any) -> None:
        self.held = held


class Configured:
    lock = LOCK

    def first(self) -> Any:
        return super().__repr__()


class Called:
    def __call__(self) -> int:
        return 7

    def __repr__(self) -> str:
        raise OSError("not today")


def held_by(value: Any) -> Any:
    return lambda: value


@pytest.mark.parametrize(
    ("value", "way"),
    [
        (LOCK, ["x (a `_thread.lock`)"]),
        ([1, {"a": LOCK}], ["x", "item 1", "item 'a' (a `_thread.lock`)"]),
        (Holder(LOCK), ["x", "attribute `held` (a `_thread.lock`)"]),
        (held_by(LOCK), ["x", "captured variable `value` (a `_thread.lock`)"]),
        (held_by(held_by(LOCK)), ["x", *["captured variable `value`"] * 2]),
        (functools.partial(held_by, LOCK), ["x", "argument 1 (a `_thread.lock`)"]),
        (functools.partial(held_by, value=[LOCK]), ["x", "argument `value`", "item 0 (a `_thr"]),
        (functools.partial(held_by(LOCK)), ["x", "function", "captured variable `value` (a"]),
        ([1, 2], []),
    ],
)
def test_what_cannot_be_pickled_is_named_with_the_way_to_it(value, way):
    found = way_to_culprit([("y", 1), ("x", value)])
    assert len(found) == len(way)
    assert all(one.startswith(start) for one, start in zip(found, way, strict=True))


def test_of_a_class_what_it_holds_is_named_and_no_method_that_names_the_class():
    names = {"LOCK": LOCK, "__name__": "__main__"}
    exec(inspect.getsource(Configured), names)
    found = way_to_culprit([("x", names["Configured"])])
    assert found == ["x", "attribute `lock` (a `_thread.lock`)"]


def test_what_is_called_is_never_shown_in_full():
    assert unisono.launch(Called(), workers=1) == [7]
    many = functools.partial(len, list(range(100_000)))
    assert unisono.launch(many, workers=1) == [100_000]
    with pytest.raises(TypeError, match=r"function `functools\.partial` → argument 2 ") as raised:
        pack_call(functools.partial(len, list(range(100_000)), LOCK), ())
    assert len(str(raised.value)) < 400
    with pytest.raises(TypeError, match="must be a function") as raised:
        pack_call(list(range(100_000)), ())  # type: ignore[arg-type]
    assert len(str(raised.value)) < 400


def test_what_holds_itself_is_no_endless_way():
    circle: list[Any] = [LOCK]
    circle.insert(0, circle)
    assert way_to_culprit([("x", circle)]) == ["x", "item 1 (a `_thread.lock`)"]


def test_an_error_of_the_callers_own_code_keeps_its_traceback():
    class Refuses:
        def __reduce__(self) -> Any:
            raise OSError("not today")

    with pytest.raises(TypeError, match=r"argument 1 .*not today") as raised:
        pack_call(print, (Refuses(),))
    assert isinstance(raised.value.__cause__, OSError)
    with pytest.raises(TypeError, match="but argument 1 ") as raised:
        pack_call(print, (LOCK,))
    assert raised.value.__cause__ is None


def test_a_result_that_cannot_travel_is_named():
    with pytest.raises(TypeError, match=r"must be picklable, but the value → item 'lock' \(a `_th"):
        unisono.launch(lambda: {"lock": threading.Lock()}, workers=1)


def test_source_that_is_in_no_file_is_known_in_workers():
    name = "<cell 7>"
    source = "def written():\n    raise KeyError(1)\n"
    linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
    assert sources_without_files()[name] == source.splitlines(keepends=True)
    namespace = {"__name__": "__main__"}
    exec(compile(source, name, "exec"), namespace)
    try:
        assert unisono.launch(inspect.getsource, namespace["written"], workers=1) == [source]
        with pytest.raises(KeyError) as raised:
            unisono.launch(namespace["written"], workers=1)
    finally:
        del linecache.cache[name]
    assert isinstance(raised.value.__cause__, unisono.WorkerError)
    assert "raise KeyError(1)" in raised.value.__cause__.remote_traceback
