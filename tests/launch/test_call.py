"""What travels to workers, and how what cannot travel is named."""

from __future__ import annotations

import functools
import inspect
import linecache
import re
import threading
from typing import Any

import pytest

import unisono
from unisono.runtime.launch.call import pack_call, sources_without_files

LOCK = threading.Lock()


class Called:
    def __call__(self) -> int:
        return 7

    def __repr__(self) -> str:
        raise OSError("not today")


def held_by(value: Any) -> Any:
    return lambda: value


@pytest.mark.parametrize(
    ("fn", "args", "named"),
    [
        (print, (1, LOCK), "but argument 2 is not (cannot pickle '_thread.lock' object)"),
        (held_by(LOCK), (), "but function `held_by.<locals>.<lambda>` is not (cannot pickle '_thr"),
        (functools.partial(len, [LOCK]), (), "but function `functools.partial` is not (cannot "),
    ],
)
def test_what_cannot_be_pickled_is_named_with_the_reason(fn, args, named):
    with pytest.raises(TypeError, match=re.escape(named)):
        pack_call(fn, args)


@pytest.mark.slow
def test_what_is_called_is_never_shown_in_full():
    assert unisono.launch(Called(), workers=1) == [7]
    many = functools.partial(len, list(range(100_000)))
    assert unisono.launch(many, workers=1) == [100_000]
    with pytest.raises(TypeError, match=r"function `functools\.partial` is not ") as raised:
        pack_call(functools.partial(len, list(range(100_000)), LOCK), ())
    assert len(str(raised.value)) < 400
    with pytest.raises(TypeError, match="must be a function") as raised:
        pack_call(list(range(100_000)), ())  # type: ignore[arg-type]
    assert len(str(raised.value)) < 400


@pytest.mark.slow
def test_a_result_that_cannot_travel_is_named():
    with pytest.raises(
        TypeError, match=r"must be picklable, but a `dict` is not \(cannot pickle '_th"
    ):
        unisono.launch(lambda: {"lock": threading.Lock()}, workers=1)


@pytest.mark.slow
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
    assert isinstance(raised.value.__cause__, unisono.errors.WorkerError)
    assert "raise KeyError(1)" in raised.value.__cause__.remote_traceback
