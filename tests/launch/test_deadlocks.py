"""Workers that all wait for each other: by tables, by what a watch sees, and in real jobs."""

from __future__ import annotations

import re
import time

import pytest
import torch
import torch.distributed as dist
from tests.launch.conftest import ALL, PIDS, Kernel
from tests.promises import promise
from torch import nn
from torch.utils.data import TensorDataset

import unisono
from unisono.runtime.launch import stall_watch
from unisono.runtime.launch.stall_watch import (
    LOOK_EVERY_S,
    Observation,
    StallWatch,
    is_deadlock,
)
from unisono.runtime.workers.control_block import ControlBlock

MEETING = Observation((), place="at `gradients of step 3`", is_at_meeting=True)
COLLECTIVE = Observation((), place="in all_reduce")
UNKNOWN = Observation(())


@pytest.mark.parametrize(
    ("workers", "expected"),
    [
        ([], False),
        ([COLLECTIVE], False),  # alone there is nobody to wait for
        ([MEETING, COLLECTIVE], True),
        ([MEETING, UNKNOWN, COLLECTIVE], True),
        ([COLLECTIVE, COLLECTIVE, COLLECTIVE], True),
        ([COLLECTIVE, UNKNOWN], False),  # it may sleep, and nobody is known to wait for it
    ],
)
def test_a_deadlock_is_one_where_somebody_is_awaited(
    workers: list[Observation], expected: bool
) -> None:
    assert is_deadlock(dict(enumerate(workers))) is expected


def test_all_are_told_of(page: ControlBlock, kernel: Kernel) -> None:
    kernel.processes = dict.fromkeys(PIDS.values(), (5, False))
    watch = StallWatch(page, 2.0)
    page.lines[0].purposes[1].value = b"gradients of step 3"
    page.lines[0].arrive()
    page.show_wait(1, b"all_reduce")
    for _ in range(3):
        kernel.now_s += LOOK_EVERY_S
        found = watch.poll(PIDS, ALL, are_grouped=True, is_everybody=True)
    ((rank, message, how),) = found
    assert (rank, how) == (1, "was ended, as all workers waited for each other for 2 s")
    assert message == (
        "workers must not wait for each other, but none has moved for 2 s: worker 0 waits at "
        "`gradients of step 3`; worker 1 waits in all_reduce; worker 2 waits for something that "
        "cannot be seen. All must call the same collectives in the same order, and none where only "
        "some come by. Worker 1 (pid 11) is ended; `--stall-timeout` or `stall_timeout_s` says "
        "after how many seconds."
    )


def ended_within(watch: StallWatch, kernel: Kernel, num_looks: int, **how: object) -> list[int]:
    """Look again and again, while those who wait look around."""
    found = []
    for _ in range(num_looks):
        kernel.now_s += LOOK_EVERY_S
        kernel.processes[10] = (kernel.processes[10][0] + 1, False)
        found += [one.rank for one in watch.poll(PIDS, ALL, are_grouped=True, **how)]  # type: ignore[arg-type]
    return found


def test_in_a_group_nobody_is_ended_as_long_as_anybody_moves(
    page: ControlBlock, kernel: Kernel
) -> None:
    kernel.processes = dict.fromkeys(PIDS.values(), (5, False))
    watch = StallWatch(page, 2.0)
    page.lines[1].arrive()  # nobody has come, but it may wait for worker 0 in a collective
    assert ended_within(watch, kernel, 9, is_everybody=True) == []
    page.show_wait(0, b"barrier (call 3)")
    page.lines[2].arrive()
    assert ended_within(watch, kernel, 4, is_everybody=False) == []  # the launcher is at work
    assert ended_within(watch, kernel, 1, is_everybody=True) == [0]


def test_waiting_again_is_a_sign_of_life(page: ControlBlock, kernel: Kernel) -> None:
    kernel.processes = dict.fromkeys(PIDS.values(), (5, False))
    watch = StallWatch(page, 2.0)
    page.lines[1].arrive()
    for _ in range(9):
        page.show_wait(0, b"barrier")
        assert ended_within(watch, kernel, 1, is_everybody=True) == []
        page.show_wait(0, b"")


def test_one_that_waits_to_make_a_group_waits(page: ControlBlock, kernel: Kernel) -> None:
    kernel.processes = dict.fromkeys(PIDS.values(), (5, False))
    watch = StallWatch(page, 2.0)
    page.lines[1].arrive()
    page.lines[2].arrive()
    page.show_wait(0, b"init_process_group")
    assert ended_within(watch, kernel, 4, is_everybody=True) == [0]


def test_one_that_a_signal_has_stopped_is_ended_in_a_group_too(
    page: ControlBlock, kernel: Kernel
) -> None:
    kernel.processes = {10: (5, False), 11: (5, True), 12: (5, False)}
    assert ended_within(StallWatch(page, 2.0), kernel, 3, is_everybody=True) == [1]


@pytest.mark.parametrize(("uses_runs", "found"), [(True, [0]), (False, [])])
def test_what_gloo_waits_for_counts_in_programs_that_have_runs(
    page: ControlBlock,
    kernel: Kernel,
    monkeypatch: pytest.MonkeyPatch,
    uses_runs: bool,
    found: list[int],
) -> None:
    monkeypatch.setattr(stall_watch, "waits_for_a_thread", lambda pid: True)
    kernel.processes = dict.fromkeys(PIDS.values(), (5, False))
    for rank in PIDS if uses_runs else ():
        page.lines[rank].arrive()
    watch = StallWatch(page, 2.0)
    for _ in range(3):
        kernel.now_s += LOOK_EVERY_S
        seen = watch.poll(PIDS, ALL, are_grouped=True, is_everybody=True)
    assert [one.rank for one in seen] == found


# Real jobs.

STALL_TIMEOUT_S = 0.4


@pytest.fixture
def looks_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stall_watch, "LOOK_EVERY_S", STALL_TIMEOUT_S / 2)


class AtStepOne(unisono.callbacks.Callback):
    def __init__(self, act):  # type: ignore[no-untyped-def]
        self.act = act

    def on_step_end(self, fit, step):  # type: ignore[no-untyped-def]
        if step.number == 1:
            self.act(fit.rank)


def only_one_calls(rank: int) -> None:
    if rank == 0:
        dist.all_reduce(torch.ones(1))


def one_receives_what_nobody_sends(rank: int) -> None:
    if rank == 1:
        dist.recv(torch.ones(1), 0)


def one_computes_for_long(rank: int) -> None:
    end = time.process_time() + 3 * STALL_TIMEOUT_S
    while rank == 0 and time.process_time() < end:
        pass
    dist.all_reduce(torch.ones(1))


def train(backend: str, act) -> str:  # type: ignore[no-untyped-def]
    dist.init_process_group(backend)
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    trainer = unisono.Trainer(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        lambda model, batch: model(batch[0]).mean(),
        shards=2,
        callbacks=[AtStepOne(act)],
    )
    digest = trainer.fit(TensorDataset(torch.ones(8, 4)), batch_size=4, steps=4).digest
    dist.destroy_process_group()
    return digest


@promise("nothing-lost.5")
@pytest.mark.slow
@pytest.mark.usefixtures("looks_often")
@pytest.mark.parametrize(
    ("backend", "act", "words"),
    [
        ("gloo", only_one_calls, "worker 0 waits in a collective of torch.distributed, or for a"),
        ("unisono", only_one_calls, r"worker 0 waits in all_reduce\(SUM\) of 1 float32 elements"),
        ("unisono", one_receives_what_nobody_sends, "a call that waits for rank 0 to send 1 float"),
    ],
)
def test_workers_that_wait_for_each_other_are_told_of_and_ended(
    backend: str, act: object, words: str, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(
        unisono.errors.WorkerError, match="as all workers waited for each other for"
    ):
        unisono.launch(train, backend, act, workers=2, stall_timeout_s=STALL_TIMEOUT_S)
    told = capfd.readouterr().err
    assert "workers must not wait for each other, but none has moved" in told

    assert re.search(words, told), told


@promise("where-it-ends.8")
@pytest.mark.slow
@pytest.mark.usefixtures("looks_often")
@pytest.mark.parametrize("backend", ["gloo", "unisono"])
def test_others_may_wait_in_a_collective_for_one_that_computes(backend: str) -> None:
    digests = unisono.launch(
        train, backend, one_computes_for_long, workers=2, stall_timeout_s=STALL_TIMEOUT_S
    )
    assert len(set(digests)) == 1
