"""The table of faults: what is asked for happens, there, once, and to nobody else."""

import os
import signal
import subprocess
import sys
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unisono.runtime.faults import (
    FAULTS_VARIABLE,
    Fault,
    Faults,
    disk_full,
    read_faults,
)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", ()),
        (" ; ;", ()),
        ("kill:rank=1,step=30", (Fault("kill", 1, 30, "begin"),)),
        (" stop : step = 0 , rank = 2 ;", (Fault("stop", 2, 0, "begin"),)),
        (
            "raise:rank=0,step=7,at=update; exit:rank=1,step=8,at=commit",
            (Fault("raise", 0, 7, "update"), Fault("exit", 1, 8, "commit")),
        ),
        ("segv:rank=0,at=start", (Fault("segv", 0, None, "start"),)),
        ("kill:rank=0,at=join", (Fault("kill", 0, None, "join"),)),
        ("kill:rank=0,at=join,step=3", (Fault("kill", 0, 3, "join"),)),
        ("disk-full:checkpoint=2", (Fault("disk-full", checkpoint=2),)),
    ],
)
def test_tables_are_understood(text, expected):
    assert read_faults(text) == expected


@pytest.mark.parametrize(
    "text",
    [
        "crash:rank=1,step=2",
        "kill",
        "kill:rank=1",
        "kill:step=1",
        "kill:step=1,at=join",
        "disk-full:",
        "disk-full:checkpoint=1,rank=0",
        "disk-full:checkpoint=1,at=begin",
        "kill:rank=1,rank=2,step=3",
        "kill:rank=1,step=3,",
        "kill:rank=one,step=3",
        "kill:rank=-1,step=3",
        "kill:rank=1,step=",
        "kill:rank=1,step=٣",
        "kill:rank=1,step=3,at=lunch",
        "kill:rank=1,step=3,at=",
        "kill:rank=1,step=3,at=start",
        "kill:rank=1,step=3 stop:rank=2,step=3",
    ],
)
def test_other_tables_are_refused(text):
    with pytest.raises(ValueError, match=r"each row must be like .* but one is"):
        read_faults(text)


@given(st.text(st.sampled_from("kilstop:;,=rank123 at") | st.characters()))
def test_no_table_makes_us_fall(text):
    with suppress(ValueError):
        read_faults(text)


def test_the_disk_is_full_at_one_checkpoint():
    faults = read_faults("disk-full:checkpoint=2; kill:rank=2,step=2")
    assert [number for number in range(5) if disk_full(faults, number)] == [2]


@pytest.mark.parametrize(
    ("at", "incarnation", "happens"),
    [
        ("update", 0, True),
        ("update", 1, False),
        ("join", 0, False),
        ("join", 1, True),
        ("join", 2, False),
    ],
)
def test_a_replacement_has_no_faults_but_those_of_joining(at, incarnation, happens):
    faults = Faults.from_environment(
        {FAULTS_VARIABLE: f"raise:rank=1,step=3,at={at}"}, 1, incarnation
    )
    if happens:
        with pytest.raises(
            RuntimeError, match=f"at {at} of step 3, asked for by {FAULTS_VARIABLE}"
        ):
            faults.meet(at, 3)
    faults.meet(at, 3)


def test_each_happens_once_and_others_meet_nothing():
    table = {FAULTS_VARIABLE: "raise:rank=1,step=3; raise:rank=1,step=3"}
    faults = Faults.from_environment(table, 1, 0)
    for _ in range(2):
        with pytest.raises(RuntimeError):
            faults.meet("begin", 3)
    faults.meet("begin", 3)
    Faults.from_environment(table, 0, 0).meet("begin", 3)
    Faults.from_environment({}, 0, 0).meet("begin", 3)


def test_before_the_script_there_is_no_step():
    faults = Faults.from_environment({FAULTS_VARIABLE: "raise:rank=0,at=start"}, 0, 0)
    with pytest.raises(RuntimeError, match="a failure at start, asked for"):
        faults.meet("start")


CODE = """
import os, resource
from unisono.runtime.faults import Faults
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
faults = Faults.from_environment(os.environ, 0, 0)
faults.meet("begin", 2)
faults.meet("begin", 3)
raise SystemExit(5)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "status"),
    [("kill", -signal.SIGKILL), ("segv", -signal.SIGSEGV), ("exit", 0)],
)
def test_a_process_ends_as_was_asked_for(kind, status):
    environ = os.environ | {FAULTS_VARIABLE: f"{kind}:rank=0,step=3"}
    assert subprocess.run([sys.executable, "-c", CODE], env=environ).returncode == status


@pytest.mark.slow
def test_a_stopped_process_is_there_and_goes_on_when_it_is_told_to():
    environ = os.environ | {FAULTS_VARIABLE: "stop:rank=0,step=3"}
    with subprocess.Popen([sys.executable, "-c", CODE], env=environ) as process:
        _, status = os.waitpid(process.pid, os.WUNTRACED)
        assert os.WIFSTOPPED(status)
        process.send_signal(signal.SIGCONT)
        assert process.wait() == 5
