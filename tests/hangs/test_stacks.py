"""Whose code a frame is, which sample is being loaded, and what is folded: by tables."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

import unisono
from unisono.runtime.hangs.stacks import (
    Frame,
    Owner,
    folded,
    read_dump,
    sample,
    sample_in,
    user_frame,
)

OURS = str(Path(unisono.__file__).parent / "data" / "fetch.py")
TORCH = "/env/lib/python3.11/site-packages/torch/nn/modules/module.py"
PILLOW = "/env/lib/python3.11/site-packages/PIL/Image.py"
THREADING = "/usr/lib/python3.11/threading.py"

MAIN = Frame("<module>", "/work/train.py", 120)
CALL = Frame("Module._call_impl", TORCH, 1500)
FETCH = Frame("_Reader._read_one", OURS, 190, {"number": "3"})
ITEM = Frame("Images.__getitem__", "/work/data.py", 70, {"self": "<Images>", "index": "10432"})
LOAD = Frame("load_image", "/work/train.py", 88, {"path": '"x.png"'})
OPEN = Frame("open", PILLOW, 3000)
WAIT = Frame("wait", THREADING, 320)


@pytest.mark.parametrize(
    ("file", "owner"),
    [
        ("/work/train.py", Owner.USER),
        ("/tmp/ipykernel_12/345.py", Owner.USER),
        (OURS, Owner.UNISONO),
        ("/env/lib/python3.11/site-packages/unisono/data/fetch.py", Owner.UNISONO),
        (TORCH, Owner.TORCH),
        (PILLOW, Owner.LIBRARY),
        ("/usr/lib/python3/dist-packages/yaml/__init__.py", Owner.LIBRARY),
        (THREADING, Owner.PYTHON),
        ("/usr/lib64/python3.13t/threading.py", Owner.PYTHON),
        ("<frozen runpy>", Owner.PYTHON),
        ("<string>", Owner.PYTHON),
        ("", Owner.PYTHON),
    ],
)
def test_a_frame_belongs_to_whoever_wrote_its_file(file: str, owner: Owner) -> None:
    assert Frame("f", file, 1).owner is owner


@pytest.mark.parametrize(
    ("stack", "place"),
    [
        ((OPEN, LOAD, ITEM, FETCH, MAIN), LOAD),
        ((LOAD, ITEM), LOAD),
        ((WAIT, CALL, OPEN, FETCH), OPEN),  # nothing of the user's: the library says most
        ((WAIT, CALL), WAIT),
        ((), None),
    ],
)
def test_the_innermost_line_of_the_users_is_where_a_rank_is(
    stack: tuple[Frame, ...], place: Frame | None
) -> None:
    assert user_frame(stack) == place


def item(function: str = "__getitem__", file: str = "/work/data.py", **arguments: str) -> Frame:
    return Frame(function, file, 1, {"self": "<Images>", **arguments})


@pytest.mark.parametrize(
    ("stack", "number"),
    [
        ((LOAD, ITEM, FETCH), "10432"),
        ((item(i="-1"),), "-1"),
        ((item("Images.__getitems__", places="[4, 5]"),), "4, 5"),
        ((item("Images.__getitems__", places="[4, 5, ...]"),), "4, 5, ..."),
        ((item(key='"a"'),), ""),
        ((item(key="<Tensor at 0x7f>"),), ""),
        ((Frame("Subset.__getitem__", TORCH, 1, {"idx": "7"}), ITEM), "10432"),
        ((LOAD, MAIN), ""),
        ((), ""),
    ],
)
def test_a_sample_is_named_by_the_argument_of_getitem(
    stack: tuple[Frame, ...], number: str
) -> None:
    assert sample_in(stack) == number


def test_others_frames_are_folded_and_the_users_are_not() -> None:
    stack = (WAIT, OPEN, LOAD, ITEM, FETCH, CALL, CALL, MAIN)
    assert list(folded(stack, "/work")) == [
        "(2 frames of other libraries, Python)",
        "load_image  train.py:88",
        "Images.__getitem__  data.py:70",
        "(3 frames of Unisono, torch)",
        "<module>  train.py:120",
    ]
    assert list(folded((LOAD, CALL), "/elsewhere")) == [
        "load_image  /work/train.py:88",
        "(1 frame of torch)",
    ]


def test_names_cannot_command_the_terminal() -> None:
    wicked = Frame("f\x1b[2J", "/work/a\x1b.py", 1)
    assert "\x1b" not in wicked.words + "".join(folded((wicked,), "/work"))


def thread(number: int, name: str, **more: object) -> dict[str, object]:
    local = [
        {"name": "index", "arg": True, "repr": "7"},
        {"name": "hidden", "arg": False, "repr": "8"},
        {"name": "unknown", "arg": True, "repr": None},
    ]
    frame = {"name": name, "filename": "a.py", "line": 3, "locals": local}
    return {"os_thread_id": number, "frames": [frame], **more}


def test_the_first_thread_is_the_one_with_the_number_of_the_process() -> None:
    expected = (Frame("main", "a.py", 3, {"index": "7"}),)
    assert read_dump([thread(11, "other"), thread(10, "main")], 10) == expected
    assert read_dump([thread(99, "main")], 10) == expected  # a fork of C code's
    without_locals = {**thread(10, "main"), "frames": [called("f")]}
    assert read_dump([without_locals], 10) == (Frame("f", "a.py", 1),)


@pytest.mark.parametrize("dump", [[], [thread(11, "a"), thread(12, "b")], [{"os_thread_id": 10}]])
def test_what_makes_no_sense_is_refused(dump: list[dict[str, object]]) -> None:
    with pytest.raises((ValueError, KeyError)):
        read_dump(dump, 10)


def called(name, line=1):
    return {"name": name, "filename": "a.py", "module": None, "line": line}


HOLDING = """
import re
def hold():
    print(flush=True)
    re.match("(a+)+$", "a" * 60 + "b")
hold()
"""


@pytest.mark.slow
def test_who_computes_in_c_is_seen_with_its_line() -> None:
    process = subprocess.Popen([sys.executable, "-c", HOLDING], stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None
        process.stdout.readline()
        until_s, places = time.monotonic() + 30, [("", 0)]
        while ("hold", 5) not in places and time.monotonic() < until_s:
            frames = sample([process.pid], 10)[process.pid].stack
            places = [(frame.name, frame.line) for frame in frames]
        assert ("hold", 5) in places
        status = os.waitid(os.P_PID, process.pid, os.WEXITED | os.WSTOPPED | os.WNOHANG)
        assert status is None
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
