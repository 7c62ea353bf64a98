"""What is believed of a process number, and what is read of its process."""

import signal
import subprocess
import sys
import time

import psutil
import pytest

from unisono.tools.report.run_progress import GONE, UNKNOWN, Named, processes_of

LATER_UNIX_S = 4e9


@pytest.fixture
def child():
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    yield process
    process.kill()
    process.communicate()


def look(pid, at_unix_s=LATER_UNIX_S):
    return processes_of({3: Named(pid, at_unix_s)})[3]


def comes_to(pid, state):
    until_s = time.monotonic() + 10
    while look(pid).state != state and time.monotonic() < until_s:
        time.sleep(0.01)
    return look(pid)


def test_a_process_is_seen_until_it_has_ended(child):
    assert look(child.pid).state == "running"
    child.send_signal(signal.SIGSTOP)
    assert comes_to(child.pid, "stopped").memory_bytes > 0
    child.kill()
    assert comes_to(child.pid, "gone") == GONE  # nobody has waited for it
    child.wait()
    assert look(child.pid) == GONE


def test_a_process_that_began_after_it_was_named_is_another(child):
    began_unix_s = psutil.Process(child.pid).create_time()
    assert look(child.pid, began_unix_s - 1.9).state == "running"
    assert look(child.pid, began_unix_s - 2.1) == GONE


@pytest.mark.parametrize("pid", [2**22 + 1, 2**53])
def test_a_process_that_is_not_there_is_gone(pid):
    assert look(pid) == GONE


def test_nobody_is_called_gone_where_processes_are_hidden(monkeypatch):
    monkeypatch.setattr(psutil, "pid_exists", lambda pid: False)
    assert look(2**22 + 1) == UNKNOWN
