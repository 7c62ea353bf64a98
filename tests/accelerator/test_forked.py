"""What happens in a forked test is what pytest reports."""

import os
import signal

import pytest
from tests.accelerator.forked import in_a_fork


def fail():
    assert os.getpid() == 0, "in another process"


def test_a_failure_is_a_failure_here():
    with pytest.raises(pytest.fail.Exception, match="in another process"):
        in_a_fork(fail)


def test_a_death_is_a_failure_here():
    with pytest.raises(pytest.fail.Exception, match="it ended with 9"):
        in_a_fork(lambda: os.kill(os.getpid(), signal.SIGKILL))
