"""The advice about shards is measured on a copy, said once, and changes nothing."""

import contextlib
import errno
import math
import os
import resource
import signal
import sys
import time

import psutil
import pytest
import torch
import torch.nn.functional as F
from tests.chaos.jobs import gone_within
from tests.warm.processes import start
from torch import nn
from torch.utils.data import TensorDataset

import unisono
from unisono.train import passes


def fit(shards, slower_by, monkeypatch, steps=12, worth_s=0.0):
    monkeypatch.setattr(passes, "SLOWER_BY", slower_by)
    monkeypatch.setattr(passes, "WORTH_S", worth_s)
    generator = torch.Generator().manual_seed(0)
    data = TensorDataset(
        torch.randn(64, 4, generator=generator), torch.randint(0, 2, (64,), generator=generator)
    )
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trainer = unisono.Trainer(
        model, optimizer, lambda m, b: F.cross_entropy(m(b[0]), b[1]), shards=shards
    )
    return trainer.fit(data, batch_size=32, steps=steps).digest


def test_more_shards_than_workers_are_told_once(monkeypatch, capsys):
    fit(4, 0.0, monkeypatch, steps=30)
    said = [line for line in capsys.readouterr().out.splitlines() if "passes of a step" in line]
    assert len(said) == 1
    assert said[0].startswith("4 shards on 1 worker: the 4 passes of a step take")
    assert "`shards=1` is faster here, with other bits" in said[0]


def test_nothing_is_measured_in_a_run_that_is_over_soon(monkeypatch, capsys):
    monkeypatch.setattr(passes, "in_a_fork", lambda measure, timeout_s: pytest.fail("measured"))
    fit(4, 0.0, monkeypatch, worth_s=passes.WORTH_S)
    assert "passes of a step" not in capsys.readouterr().out


@pytest.mark.parametrize(("together_s", "is_said"), [(0.9, False), (0.4, True)])
def test_what_saves_little_time_in_all_is_not_said(monkeypatch, together_s, is_said):
    monkeypatch.setattr(passes, "in_a_fork", lambda measure, timeout_s: together_s)
    monkeypatch.setattr(passes, "SLOWER_BY", 1.0)
    said = watch_of(monkeypatch, [2] * 8, steps_to_go=100)  # a step's passes take a second
    assert (said[-1] is not None) is is_said


@pytest.mark.parametrize(("shards", "slower_by"), [(1, 0.0), (4, float("inf"))])
def test_nothing_is_said_where_nothing_is_lost(shards, slower_by, monkeypatch, capsys):
    fit(shards, slower_by, monkeypatch)
    assert "passes of a step" not in capsys.readouterr().out


def test_measuring_changes_no_bit(monkeypatch):
    measured = fit(4, 0.0, monkeypatch)
    monkeypatch.setattr(passes.PassWatch, "advice", lambda self, steps_to_go: None)
    assert fit(4, 0.0, monkeypatch) == measured


def test_batches_of_any_shape_are_joined():
    one = {"x": torch.ones(2, 3), "y": [torch.zeros(2), (torch.ones(2),)]}
    both = passes.joined([one, one])
    assert both["x"].shape == (4, 3)
    assert both["y"][1][0].tolist() == [1.0] * 4
    with pytest.raises(TypeError, match="batches of str"):
        passes.joined(["a", "b"])


def test_reading_and_waiting_for_the_others_do_not_count_as_a_pass(monkeypatch):
    now_s = [0.0]

    def read():
        for _ in range(2):
            now_s[0] += 30.0
            yield torch.ones(1)

    monkeypatch.setattr(passes.time, "perf_counter", lambda: now_s[0])
    together = []
    monkeypatch.setattr(passes, "in_a_fork", lambda measure, timeout_s: together.append(timeout_s))
    watch = passes.PassWatch(nn.Linear(1, 1), lambda model, batch: None, unisono.World(0, 1), 2)
    for _ in range(8):
        for _batch in watch.timed(read()):
            now_s[0] += 0.5
        now_s[0] += 100.0  # the others are slow
        watch.advice()
    assert together == [10 * 5 * 1.0 + 1.0]  # ten times what the five passes of a step last


def watch_of(monkeypatch, passes_in_step, slow_s=0.0, steps_to_go=math.inf):
    """Watch steps with so many passes each, on a clock that only passes and others move."""
    now_s = [0.0]
    monkeypatch.setattr(passes.time, "perf_counter", lambda: now_s[0])
    watch = passes.PassWatch(nn.Linear(1, 1), lambda model, batch: None, unisono.World(0, 2), 4)
    said = []
    for num_passes in passes_in_step:
        for _batch in watch.timed(iter([torch.ones(1)] * num_passes)):
            now_s[0] += 0.5
        now_s[0] += slow_s
        said.append(watch.advice(steps_to_go))
        now_s[0] += slow_s
    return said


def test_a_step_without_a_shard_for_rank_0_is_not_timed(monkeypatch):
    timeouts = []
    monkeypatch.setattr(passes, "in_a_fork", lambda measure, timeout_s: timeouts.append(timeout_s))
    watch_of(monkeypatch, [2, 2, 2, 2, 0, 2, 2, 2], slow_s=3.0)
    assert timeouts == [10 * 5 * 1.0 + 1.0]


def test_passes_are_compared_with_steps_of_as_many(monkeypatch):
    timeouts = []
    monkeypatch.setattr(passes, "in_a_fork", lambda measure, timeout_s: timeouts.append(timeout_s))
    watch_of(monkeypatch, [2, 2, 2, 2, 1, 2, 2, 2])
    assert timeouts == [10 * 5 * 1.0 + 1.0]


@pytest.mark.parametrize(("device", "is_watching"), [("sim", False), ("cpu", True)])
def test_nothing_is_measured_for_a_model_on_a_device(accelerator, device, is_watching):
    """A fork of a process that uses a GPU cannot use one."""
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trainer = unisono.Trainer(model, optimizer, lambda *_: None, shards=2, device=device)
    assert trainer._passes.is_watching is is_watching


def test_nothing_is_measured_where_the_last_step_that_is_watched_is_short(monkeypatch):
    monkeypatch.setattr(passes, "in_a_fork", lambda measure, timeout_s: pytest.fail("measured"))
    assert watch_of(monkeypatch, [2] * 7 + [0]) == [None] * 8


@pytest.mark.parametrize("call", ["pipe", "fork", "read", "kill", "waitpid"])
def test_no_failure_of_the_system_ends_a_run_for_advice(call, monkeypatch):
    def fail(*arguments):
        raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))

    children = []
    fork, waitpid, kill = os.fork, os.waitpid, os.kill

    def forked():
        children.append(fork())
        return children[-1]

    monkeypatch.setattr(os, "fork", forked)
    monkeypatch.setattr(os, call, fail)
    number = passes.in_a_fork(lambda: 1.0, 10.0)
    assert number is None if call in ("pipe", "fork", "read") else number in (None, 1.0)
    monkeypatch.undo()
    for child in children:
        try:
            kill(child, signal.SIGKILL)
            waitpid(child, 0)
        except (ProcessLookupError, ChildProcessError):
            pass


def test_advice_is_measured_in_a_process_with_many_open_files():
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < 1500:
        pytest.skip("this system allows too few open files")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 1500), hard))
    files = [os.open(os.devnull, os.O_RDONLY) for _ in range(1100)]
    try:
        assert passes.in_a_fork(lambda: 2.5, 10.0) == 2.5
    finally:
        for fd in files:
            os.close(fd)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_program_that_lets_the_system_bury_its_children_goes_on():
    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    try:
        assert passes.in_a_fork(lambda: 2.5, 10.0) == 2.5
    finally:
        signal.signal(signal.SIGCHLD, before)


def test_a_measurement_that_hangs_holds_nobody_up_for_long(monkeypatch):
    monkeypatch.setattr(passes, "LONGEST_S", 0.05)
    assert passes.in_a_fork(lambda: time.sleep(600) or 1.0, 1e9) is None
    assert passes.in_a_fork(lambda: time.sleep(600) or 1.0, -2.0) is None


def test_batches_that_cannot_be_joined_give_no_advice():
    model = nn.Linear(1, 1)
    watch = passes.PassWatch(model, lambda model, batch: None, unisono.World(0, 1), 2)
    for _ in range(8):
        for _batch in watch.timed(iter([object(), "odd"])):
            pass
        assert watch.advice() is None


def test_a_step_that_raised_leaves_no_batch_to_the_next(monkeypatch):
    timeouts = []
    monkeypatch.setattr(passes, "in_a_fork", lambda measure, timeout_s: timeouts.append(timeout_s))
    watch = passes.PassWatch(nn.Linear(1, 1), lambda model, batch: None, unisono.World(0, 1), 2)
    for _ in range(8):
        for raises in (True, False):
            with contextlib.suppress(ArithmeticError):
                for _batch in watch.timed(iter([torch.ones(1)] * 2)):
                    if raises:
                        raise ArithmeticError
        watch.advice()
    assert len(timeouts) == 1


@pytest.mark.slow
def test_a_measurement_ends_with_a_worker_that_is_killed(tmp_path):
    code = (
        "import os, pathlib, sys, time\n"
        "from unisono.train.passes import in_a_fork\n"
        "beside = pathlib.Path(sys.argv[1])\n"
        "def measure():\n"
        "    beside.write_text(str(os.getpid()))\n"
        "    beside.rename(sys.argv[2])\n"
        "    time.sleep(600)\n"
        "in_a_fork(measure, 600.0)\n"
    )
    told = tmp_path / "pid"
    with start([sys.executable, "-c", code, str(tmp_path / "new"), str(told)]) as process:
        while not told.exists():
            assert process.poll() is None
            time.sleep(0.001)
        measuring = psutil.Process(int(told.read_text()))
        process.kill()
    try:
        assert gone_within([measuring], 30) == []
    finally:
        with contextlib.suppress(psutil.NoSuchProcess):
            measuring.kill()
