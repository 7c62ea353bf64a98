"""What happens in a forked test is what pytest reports."""

import os
import signal

import pytest
import torch
from tests.accelerator.forked import in_a_fork


def fail():
    assert os.getpid() == 0, "in another process"


def test_a_failure_is_a_failure_here():
    with pytest.raises(pytest.fail.Exception, match="in another process"):
        in_a_fork(fail)


def test_a_skip_is_a_skip_here():
    with pytest.raises(pytest.skip.Exception, match="no reason"):
        in_a_fork(lambda: pytest.skip("no reason"))


def test_a_death_is_a_failure_here():
    with pytest.raises(pytest.fail.Exception, match="it ended with 9"):
        in_a_fork(lambda: os.kill(os.getpid(), signal.SIGKILL))


def test_what_passes_changes_nothing_here():
    changed = []
    in_a_fork(lambda: changed.append(1))
    assert changed == []


@pytest.fixture
def backward_pass_before():
    torch.ones((), requires_grad=True).backward()


@pytest.mark.usefixtures("backward_pass_before", "accelerator")
def test_a_backward_pass_before_the_fork_does_not_matter():
    number = torch.ones((), requires_grad=True, device="sim:2")
    (number * 2).backward()
    assert number.grad.item() == 2
