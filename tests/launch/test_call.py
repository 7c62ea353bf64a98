"""What travels to workers, and how what cannot travel is named."""

from __future__ import annotations

import inspect
import linecache
import threading
from typing import Any

import pytest

import unisono
from unisono.launch.call import pack_call, sources_without_files, way_to_culprit

LOCK = threading.Lock()


class Holder:
    def __init__(self, held: Any) -> None:
        self.held = held


def held_by(value: Any) -> Any:
    return lambda: value


def uses_lock() -> Any:
    return LOCK


@pytest.mark.parametrize(
    ("fn", "args", "way"),
    [
        (print, (1, LOCK), ["argument 2 (a `_thread.lock`)"]),
        (print, ([1, {"a": LOCK}],), ["argument 1", "item 1", "item 'a' (a `_thread.lock`)"]),
        (print, (Holder(LOCK),), ["argument 1", "attribute `held` (a `_thread.lock`)"]),
        (
            held_by(LOCK),
            (),
            [
                "function `held_by.<locals>.<lambda>`",
                "captured variable `value` (a `_thread.lock`)",
            ],
        ),
        (print, (1, 2), []),
    ],
)
def test_what_cannot_be_pickled_is_named_with_the_way_to_it(fn, args, way):
    assert way_to_culprit(fn, args) == way


def test_what_holds_itself_is_no_endless_way():
    circle: list[Any] = [LOCK]
    circle.insert(0, circle)
    assert way_to_culprit(print, (circle,)) == ["argument 1", "item 1 (a `_thread.lock`)"]


def test_an_error_of_the_callers_own_code_keeps_its_traceback():
    class Refuses:
        def __reduce__(self) -> Any:
            raise OSError("not today")

    with pytest.raises(TypeError, match=r"argument 1 .*not today") as raised:
        pack_call(print, (Refuses(),))
    assert isinstance(raised.value.__cause__, OSError)
    with pytest.raises(TypeError) as raised:
        pack_call(print, (LOCK,))
    assert raised.value.__cause__ is None


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
