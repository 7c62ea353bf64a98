"""A signal that is to end a job lets the step finish, and leaves a checkpoint, anywhere."""

import faulthandler
import functools
import os
import signal
import sys
import time

import pytest
import torch
from tests.promises import promise
from tests.train.test_elsewhere import in_a_fork
from tests.workers.forked import job  # noqa: F401
from torch.utils.data import TensorDataset

import unisono
from unisono.callbacks import Callback
from unisono.runtime import signals
from unisono.runtime.checkpoint.run_directory import RunDirectory

pytestmark = pytest.mark.slow

ASKED_AT, STEPS = 5, 12


class Asks(Callback):
    """Sends this worker, or once the process `pid`, signals as step 5 begins."""

    def __init__(self, *signals, every_s=0.0, pid=None):
        self.signals, self.every_s, self.pid = signals, every_s, pid

    def on_step_begin(self, fit):
        if fit.step == ASKED_AT and (self.pid is None or fit.is_leader):
            for number, signum in enumerate(self.signals):
                time.sleep(self.every_s * bool(number))
                os.kill(self.pid or os.getpid(), signum)


def train(directory=None, *callbacks, every=1000):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
    trainer = unisono.Trainer(
        model,
        torch.optim.Adam(model.parameters(), lr=0.1),
        lambda model, batch: model(batch[0]).square().mean(),
        shards=4,
        directory=directory,
        checkpoint=every if directory else None,
        callbacks=callbacks,
    )
    trainer.fit(TensorDataset(torch.randn(40, 3)), batch_size=8, steps=STEPS)
    return trainer.digest()


@functools.cache
def undisturbed():
    return train()


def asked(job, world_size, directory, signals_of):  # noqa: F811
    def work(rank):
        torch.set_num_threads(1)
        return train(directory, Asks(*signals_of.get(rank, ())))

    return job.run(work, world_size)


@promise("nothing-lost.10")
@pytest.mark.parametrize(
    ("world_size", "signals_of"),
    [
        (1, {0: [signal.SIGTERM]}),
        (2, {0: [signal.SIGTERM], 1: [signal.SIGTERM]}),
        (2, {1: [signal.SIGTERM]}),  # some launchers tell one worker alone
        (3, {0: [signal.SIGTERM]}),
        (2, {0: [signal.SIGTERM] * 2, 1: [signal.SIGTERM] * 3}),  # and some tell it twice
        (2, {1: [signal.SIGINT]}),
        (1, {0: [signal.SIGUSR1]}),
        (2, {1: [signal.SIGUSR2]}),
    ],
    ids=str,
)
def test_the_step_is_finished_and_kept_and_all_end(job, tmp_path, world_size, signals_of):  # noqa: F811
    directory = str(tmp_path / "run")
    said = asked(job, world_size, directory, signals_of)
    (signum,) = {signum for signals in signals_of.values() for signum in signals}
    kind = ("SystemExit", str(128 + signum))
    kind = ("KeyboardInterrupt", "") if signum == signal.SIGINT else kind
    assert [(one.error, one.text) for one in said] == [kind] * world_size, said
    steps = [entry.step for entry in RunDirectory(tmp_path / "run").entries()]
    # Where one worker alone was told, the others may hear of it a step later.
    assert steps[0] in (ASKED_AT + 1, ASKED_AT + 2), steps
    other = 3 - world_size if world_size < 3 else 2
    again = job.run(in_a_fork(functools.partial(train, directory)), other)
    assert [one.value for one in again] == [undisturbed()] * other, again


def test_a_second_signal_ends_at_once(job, tmp_path):  # noqa: F811
    def work(rank):
        signals.ONE_SIGNAL_S = 0.01
        torch.set_num_threads(1)
        return train(str(tmp_path / "run"), Asks(*[signal.SIGTERM] * 2, every_s=0.1))

    said = job.run(work, 2)
    assert ("SystemExit", "143") in [(one.error, one.text) for one in said], said
    assert {one.error for one in said} <= {"SystemExit", "PeerLostError"}
    # Nothing of the step under way, which ends there.
    assert [entry.step for entry in RunDirectory(tmp_path / "run").entries()] in ([], [ASKED_AT])


def test_without_a_directory_it_ends_at_once(job):  # noqa: F811
    said = asked(job, 2, None, {0: [signal.SIGTERM], 1: [signal.SIGTERM]})
    assert [one.exit_code for one in said] == [-signal.SIGTERM] * 2, said


def test_a_process_that_goes_on_after_ctrl_c_can_train_again(tmp_path):
    with pytest.raises(KeyboardInterrupt):
        train(str(tmp_path / "run"), Asks(signal.SIGINT))
    assert train(str(tmp_path / "run")) == undisturbed()


@pytest.mark.parametrize("world_size", [1, 2])
def test_the_programs_own_handler_is_called_once_all_is_kept(job, tmp_path, world_size):  # noqa: F811
    """As submitit's, which puts its job into the queue again and ends rank 0 alone."""

    def work(rank):
        torch.set_num_threads(1)
        called = []

        def handle(signum, frame):
            steps = [entry.step for entry in RunDirectory(tmp_path / "run").entries()]
            called.append((signum, steps))

        before = {signum: signal.signal(signum, handle) for signum in asked_by}
        digest = train(str(tmp_path / "run"), Asks(*asked_by))
        handlers = {signum: signal.signal(signum, before[signum]) for signum in asked_by}
        assert set(handlers.values()) == {handle}
        return digest, called

    asked_by = (signal.SIGTERM, signal.SIGUSR2)
    said = job.run(work, world_size)
    assert not any(one.error for one in said), said
    for digest, called in (one.value for one in said):
        assert digest == undisturbed()
        assert called == [[signum, [ASKED_AT + 1]] for signum in (signal.SIGUSR2, signal.SIGTERM)]


def test_a_program_that_launches_its_workers_hears_notices(tmp_path):
    directory = str(tmp_path / "run")
    with pytest.raises(SystemExit, match="138"):
        unisono.launch(train, directory, Asks(signal.SIGUSR1, pid=os.getpid()), workers=2)
    entry = RunDirectory(tmp_path / "run").entries()[0]
    assert ASKED_AT < entry.step < STEPS
    assert unisono.launch(train, directory, workers=1) == [undisturbed()]


@pytest.mark.parametrize("case", [(2, 4, 1), (1, 4, 0), (2, None, 0)])
def test_what_a_lost_worker_costs_is_told_once(job, tmp_path, capfd, monkeypatch, case):  # noqa: F811
    world_size, every, told = case
    monkeypatch.setattr(sys.modules["__main__"], "__file__", "train.py", raising=False)
    directory = str(tmp_path / "run") if every else None
    job.run(in_a_fork(functools.partial(train, directory, every=every)), world_size)
    line = "since the newest checkpoint is computed again; `unisono run -n 2 train.py` would"
    assert capfd.readouterr().out.count(line) == told


def test_a_handler_in_c_is_the_programs():
    assert signals.is_free(signal.SIGUSR1)
    faulthandler.register(signal.SIGUSR1)
    try:
        assert not signals.is_free(signal.SIGUSR1)
    finally:
        faulthandler.unregister(signal.SIGUSR1)
    assert signals.is_free(signal.SIGUSR1)
