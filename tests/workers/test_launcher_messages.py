"""Every kind of message arrives as it was sent, and nothing else is taken for one."""

import dataclasses
import json
import math

import pytest

from unisono.runtime.workers import launcher_messages as codec
from unisono.runtime.workers.launcher_messages import (
    KINDS,
    Acknowledged,
    Begun,
    CatchUp,
    Continue,
    Forked,
    ForkWorker,
    JointResult,
    KeepFile,
    Live,
    LockRequest,
    LoopBegan,
    MakesGroup,
    Membership,
    MemoryGranted,
    MemoryReleased,
    MemoryRequest,
    NoRecovery,
    Passed,
    ProgramDone,
    ProgramFailed,
    Ready,
    Refused,
    RemoveAtEnd,
    ShowProgress,
    SignalWorkers,
    Stopped,
    WorkerExited,
    WriteRequest,
    decode,
    encode,
)

MEMBERSHIP = Membership((0, 2), leader=2, generation=5, why="worker 1 was killed")
MESSAGES = [
    Begun(),
    Ready(),
    MakesGroup(),
    NoRecovery("größer als \udcff"),
    JointResult(3, "digest", b"\0\1"),
    JointResult(3, "digest", b""),
    LoopBegan(1, {"shards": 8, "directory": None, "slots_at": [1, 2]}),
    MemoryReleased(7),
    RemoveAtEnd("/tmp/a file"),
    KeepFile("/tmp/a file"),
    ShowProgress({"done": 1, "loss": 0.5}),
    ProgramDone(b"pickled"),
    ProgramFailed(1, "ValueError: no", "Traceback …", None, False, b""),
    ProgramFailed(70, "", "", 3, True, b"pickled"),
    MemoryRequest(1 << 40, 2**40),
    Stopped(2**32 - 1, between_steps=True),
    CatchUp(0, "loop"),
    WriteRequest({"key": 1, "directory": "runs/1"}, wait=False),
    LockRequest("runs/1"),
    Acknowledged(),
    MemoryGranted((5,)),
    Continue(MEMBERSHIP),
    Passed(b"outcome"),
    Passed(b"", {"key": 1}),
    Live(MEMBERSHIP, {"key": 1}, is_alone=False),
    Live(Membership.of(1), None, is_alone=True),
    Refused("it must not"),
    ForkWorker(1, 0, (3, 4, 5)),
    SignalWorkers((0, 1), 15),
    Forked(1, 4711),
    WorkerExited(1, -9),
]


def travelled(message):
    header, payload, fds = encode(message)
    return decode(header.encode("ascii"), payload, fds)


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_a_message_arrives_as_it_was_sent(message):
    arrived = travelled(message)
    assert arrived == message
    assert type(arrived) is type(message)
    if isinstance(message, Continue | Live):
        assert arrived.membership.why == message.membership.why  # not compared


def test_every_kind_is_in_the_table():
    assert {type(message).__name__ for message in MESSAGES} == KINDS.keys()


@dataclasses.dataclass(frozen=True)
class Waited:
    waited_s: float


def test_whole_numbers_are_seconds_too_and_what_is_no_number_travels():
    assert type(codec.from_fields(Waited, {"waited_s": 30}).waited_s) is float
    assert math.isnan(travelled(ShowProgress({"loss": math.nan})).state["loss"])


RANK_OF_ALL = {"rank": 0, "pid": 1}


@pytest.mark.parametrize(
    ("header", "words"),
    [
        ({"type": "spawn"}, "must be one of Begun, Ready"),
        ([], "must be one of Begun, Ready"),
        (["Forked"], "must be one of Begun, Ready"),
        (["Forked", []], "must be one of Begun, Ready"),
        (["Message", {}], "but is \\['Message', {}\\]"),
        (["Popen", {"args": "ls"}], "but is \\['Popen', {'args': 'ls'}\\]"),
        ([["Forked"], {}], "must be one of"),
        (["Forked", {}], "Forked must have the fields \\(rank, pid\\), but has \\(\\)"),
        (["Forked", {**RANK_OF_ALL, "x": 1}], "but has \\(rank, pid, x\\)"),
        (
            ["Forked", {**RANK_OF_ALL, "pid": "1"}],
            "`pid` of Forked must be of type int, but is",
        ),
        (["Forked", {**RANK_OF_ALL, "pid": True}], "must be of type int, but is True"),
        (["Forked", {**RANK_OF_ALL, "pid": 1.0}], "must be of type int, but is 1.0"),
        (["Forked", {**RANK_OF_ALL, "pid": None}], "must be of type int, but is None"),
        (["Stopped", {"arrivals": 1, "between_steps": 1}], "must be of type bool, but is 1"),
        (["LoopBegan", {"index": 1, "facts": [1]}], "`facts` of LoopBegan must be of type"),
        (["SignalWorkers", {"ranks": 3, "signum": 9}], "`ranks` of SignalWorkers must be"),
        (["SignalWorkers", {"ranks": [0, "x"], "signum": 9}], "but is 'x'"),
        (["Continue", {"membership": {"ranks": [0]}}], "Membership must have the fields"),
        (["Continue", {"membership": 3}], "Membership must have the fields .* but has \\(3\\)"),
        (["ProgramDone", {}], None),
    ],
)
def test_what_is_no_message_is_refused_with_a_sentence(header, words):
    text = json.dumps(header).encode()
    if words is None:
        assert decode(text, b"", ()) == ProgramDone(b"")
        return
    with pytest.raises(ValueError, match=words):
        decode(text, b"", ())


def test_what_travels_beside_a_message_must_belong_to_it():
    header = encode(Begun())[0].encode()
    with pytest.raises(ValueError, match=r"Begun must have the fields \(\), but has \(payload\)"):
        decode(header, b"bytes", ())
    with pytest.raises(ValueError, match=r"but has \(fds\)"):
        decode(header, b"", (3,))
    with pytest.raises(ValueError):
        decode(b"\x80\x04cos", b"", ())
