"""What an author sees of an exception: the frames that are theirs, and the sentence."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
from torch.distributed import DistNetworkError

from unisono.errors import PeerLostError
from unisono.runtime.launch import exceptions, forkserver, worker
from unisono.runtime.launch.exceptions import (
    is_disconnect,
    lost_peer,
    own_excepthook,
    summary_line,
    traceback_text,
)
from unisono.runtime.launch.pickling import dumps


def raised_by(act: Callable[[], object]) -> BaseException:
    try:
        act()
    except BaseException as error:
        return error
    raise AssertionError("must raise")


def test_a_lost_peer_is_found_in_the_chain() -> None:
    def fail() -> None:
        try:
            raise PeerLostError("gone", rank=2)
        except PeerLostError:
            raise KeyError("while that was handled") from None

    assert lost_peer(raised_by(fail)) == 2
    assert lost_peer(KeyError()) is None


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (RuntimeError("[pair.cc:537] Connection closed by peer [127.0.0.1]:3"), True),
        (DistNetworkError("Failed to recv. Connection was likely closed."), True),
        (DistNetworkError("No route to host"), True),  # a host that is switched off
        (RuntimeError("my database: Connection refused"), False),
        (RuntimeError("shapes differ"), False),
        (ConnectionResetError("Connection reset by peer"), False),  # a socket of the program's own
    ],
)
def test_lost_connections_of_groups_are_known(error: Exception, expected: bool) -> None:
    assert is_disconnect(error) == expected
    assert is_disconnect(raised_by(lambda: _raise_from(error))) == expected


def _raise_from(error: Exception) -> None:
    raise KeyError("theirs") from error


def test_an_exception_that_is_its_own_cause_is_read_once() -> None:
    error = KeyError("learning_rate")
    error.__cause__ = error
    assert lost_peer(error) is None
    assert not is_disconnect(error)


@pytest.mark.parametrize("kind", [Exception, RuntimeError])
def test_an_exception_without_a_text_is_reported(kind: type[Exception]) -> None:
    class Unprintable(kind):  # type: ignore[misc, valid-type]
        def __str__(self) -> str:
            raise TypeError

    assert not is_disconnect(Unprintable())
    assert summary_line(Unprintable()).endswith("Unprintable: <exception str() failed>")
    assert worker._exit_status(SystemExit(Unprintable())) == (1, "")


def test_a_worker_without_descriptors_can_still_report_that() -> None:
    needed = sys.modules[dumps.__module__]  # `pack_exception` imports it
    assert needed.__name__ in forkserver.PRELOADED


def test_cells_are_named_in_groups_of_exceptions_too(monkeypatch: pytest.MonkeyPatch) -> None:
    cells = {"/tmp/ipykernel_1/2.py": ("Cell", "In[3]")}
    shell = SimpleNamespace(compile=SimpleNamespace(format_code_name=cells.get))
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: shell))
    text = """\
  + Exception Group Traceback (most recent call last):
  |   File "/tmp/ipykernel_1/2.py", line 4, in fail
  +-+---------------- 1 ----------------
    | Traceback (most recent call last):
    |   File "/tmp/ipykernel_1/2.py", line 2, in inner
    |   File "/tmp/other.py", line 1, in f
"""
    named = exceptions.name_cells(text).splitlines()
    assert named[1] == "  |   Cell In[3], line 4, in fail"
    assert named[4:] == [
        "    |   Cell In[3], line 2, in inner",
        '    |   File "/tmp/other.py", line 1, in f',
    ]


def test_only_a_hook_that_the_program_has_set_is_its_own() -> None:
    def wrapped(old_hook: Callable[..., None]) -> Callable[..., None]:
        def hook(*arguments: object) -> None:
            old_hook(*arguments)

        hook.__module__ = "torch.distributed.distributed_c10d"
        return hook

    assert own_excepthook(sys.__excepthook__) is None
    assert own_excepthook(wrapped(wrapped(sys.__excepthook__))) is None
    assert own_excepthook(print) is print
    assert own_excepthook(wrapped(print)) is print


NATIVE = """RuntimeError: Connection closed by peer
Exception raised from recvBytes at /pytorch/torch/csrc/distributed/c10d/Utils.hpp:675 (most recent call first):
frame #0: c10::Error::Error(c10::SourceLocation) + 0xb0 (0x7f23 in /lib/libc10.so)
frame #1: <unknown function> + 0x5ffc (0x7f24 in /lib/libtorch_cpu.so)

This exception was thrown by __iter__
This was in step 3."""  # noqa: E501


def test_stacks_of_native_code_are_folded(monkeypatch: pytest.MonkeyPatch) -> None:
    assert exceptions.without_native_frames(NATIVE).splitlines() == [
        "RuntimeError: Connection closed by peer",
        "(2 frames of C++ left out; TORCH_SHOW_CPP_STACKTRACES=1 shows them)",
        "This exception was thrown by __iter__",
        "This was in step 3.",
    ]
    assert exceptions.without_native_frames("frame #1 of the film") == "frame #1 of the film"
    monkeypatch.setenv("TORCH_SHOW_CPP_STACKTRACES", "1")
    assert exceptions.without_native_frames(NATIVE) == NATIVE


def test_the_summary_of_an_exception_is_its_own_word_and_not_its_place() -> None:
    error = raised_by(lambda: {}["the original"])  # type: ignore[typeddict-item]
    error.add_note("This was in step 3.")
    assert exceptions.summary_line(error) == "KeyError: 'the original'"
    assert traceback_text(error).endswith("\nThis was in step 3.")


def test_a_group_is_summed_up_by_what_is_in_it() -> None:
    inner = ExceptionGroup("inner", [ValueError("bad shard 1"), ValueError("bad shard 1")])
    group = ExceptionGroup("reading failed", [inner, OSError(5, "no disk\nat all"), KeyError(1)])
    said = "ExceptionGroup: reading failed (3 sub-exceptions): "
    assert (
        summary_line(group)
        == f"{said}ValueError: bad shard 1; OSError: [Errno 5] no disk; KeyError: 1"
    )


def test_a_lost_peer_is_found_in_a_group() -> None:
    group = ExceptionGroup("tasks", [KeyError(), ExceptionGroup("", [PeerLostError("", rank=2)])])
    assert lost_peer(group) == 2
    assert is_disconnect(ExceptionGroup("tasks", [RuntimeError("[pair.cc:1] Broken pipe")]))


def test_frames_of_unisono_are_folded_between_the_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    package = Path(exceptions.__file__).resolve().parents[2]
    text = f"""\
  + Exception Group Traceback (most recent call last):
  |   File "/home/train.py", line 4, in <module>
  |     fit()
  |   File "{package}/training/fit.py", line 9, in fit
  |     self._loss(
  |     ^^^^^^^^^^^
  |   File "{package}/training/step.py", line 2, in again
  |     again()
  |   [Previous line repeated 3 more times]
  |   File "/home/loss.py", line 2, in loss
  |     raise ValueError
  |   File "{package}/runtime/whole.py", line 2, in check
  | ValueError: of mine"""
    folded = exceptions.without_own_frames(text).splitlines()
    shows = "`unisono run --traceback`, or UNISONO_TRACEBACK=1, shows all"
    assert folded == [
        "  + Exception Group Traceback (most recent call last):",
        '  |   File "/home/train.py", line 4, in <module>',
        "  |     fit()",
        f"  |   (2 frames of Unisono left out; {shows})",
        '  |   File "/home/loss.py", line 2, in loss',
        "  |     raise ValueError",
        f"  |   (1 frame of Unisono left out; {shows})",
        "  | ValueError: of mine",
    ]
    alone = f'Traceback:\n  File "{package}/a.py", line 1, in f\n    f()\nKeyError: 1'
    assert exceptions.without_own_frames(alone) == alone  # a bug of ours
    monkeypatch.setenv("UNISONO_TRACEBACK", "1")
    assert exceptions.without_own_frames(text) == text


def test_a_worker_whose_program_has_closed_standard_error_ends_as_it_would(monkeypatch):
    """It left with status 70 at the end of a program that had done all its work."""
    closed = io.StringIO()
    closed.close()
    monkeypatch.setattr(sys, "stderr", closed)
    worker._continue(lambda: closed.write("x"))
