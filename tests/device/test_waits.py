"""The host waits for the device at the places that are named here, and at no others.

Programs that say so, step by step, are run in workers, too.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.accelerator import sim
from tests.chaos.exchanges import ACCELERATED, skip_without
from tests.device import test_models_there as there
from tests.once import computed_once
from tests.parity import cases
from torch import nn

import unisono
from unisono.callbacks import Callback
from unisono.runtime.device import Copies, Device

WARM_UP, STEPS = 9, 15  # without steps that are powers of two, which are looked at closely
WATCHED = STEPS - WARM_UP - 1  # steps; the last ends the loop
BATCH_SIZE = 20
Waits = list[list[str]]  # by step: what for, and where


class Watch(Callback):
    """Collects what is waited for from the begin of one step to that of the next. Final."""

    def __init__(self) -> None:
        self.steps: list[list[str]] = []
        self._seen: list[sim.Synchronization] = []
        self._asked: list[str] = []  # who asked again and again until copies were made

    def on_step_begin(self, fit: Any) -> None:
        self.next()

    def on_end(self, fit: Any, summary: Any) -> None:
        self.next()

    def next(self) -> None:
        waited = [f"{each.kind}: {Path(each.file).name}:{each.function}" for each in self._seen]
        self.steps.append(waited + self._asked)
        self._seen.clear()
        self._asked.clear()

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        wait = Copies.wait

        def watched(copies: Copies) -> None:
            if copies._busy:
                caller = sys._getframe(1).f_code
                self._asked.append(f"{Path(caller.co_filename).name}:{caller.co_qualname}")
            wait(copies)

        with sim.synchronizations() as self._seen, pytest.MonkeyPatch.context() as patch:
            patch.setattr(Copies, "wait", watched)
            yield

    @property
    def found(self) -> Waits:
        """Every step after the warm-up, but for the last, behind which the loop ends."""
        return self.steps[1 + WARM_UP : -1]


def samples(num_samples: int = 200) -> torch.utils.data.TensorDataset:
    generator = torch.Generator().manual_seed(1)
    return torch.utils.data.TensorDataset(
        torch.randn(num_samples, 1, 8, 8, generator=generator),
        torch.randint(0, 10, (num_samples,), generator=generator),
    )


def with_sums(model: nn.Module, batch: Any) -> Any:
    """A loss in which weights differ from shard to shard."""
    losses = F.cross_entropy(model(batch[0]), batch[1], reduction="none")
    counts = (batch[1] > 2).float()
    return {"loss": ((losses * counts).sum(), counts.sum()), "peak": losses.max()}


LOSSES: dict[str, Callable[..., Any]] = {"mean": cases.classify, "sums": with_sums}


def make(*, norm: bool, dropout: float) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = cases.Cnn(norm=norm, dropout=dropout)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def waits_of_trainer(
    loss: str = "mean", *, norm: bool = True, dropout: float = 0.2, **options: Any
) -> Waits:
    """Train with a Trainer on the accelerator."""
    sim.install()
    model, optimizer = make(norm=norm, dropout=dropout)
    watch = Watch()
    trainer = unisono.Trainer(
        model, optimizer, LOSSES[loss], shards=4, callbacks=[watch], device="sim", **options
    )
    with watch.watching():
        trainer.fit(samples(), batch_size=BATCH_SIZE, steps=STEPS)
    return watch.found


def waits_of_run(loss: str = "mean", *, norm: bool = True, dropout: float = 0.2) -> Waits:
    """Train with a loop of one's own on the accelerator."""
    sim.install()
    model, optimizer = make(norm=norm, dropout=dropout)
    run = unisono.Run(model, optimizer, shards=4, device="sim")
    watch = Watch()
    model.train()
    with watch.watching():
        for step in run.steps(samples(), batch_size=BATCH_SIZE, steps=STEPS):
            watch.next()
            with step:
                for batch in step.shards:
                    step.backward(LOSSES[loss](model, batch))
        watch.next()
    return watch.found


# Once a step, before the workers first meet: losses are there then, and parts on the host.
ALONE = ["loss.py:PendingLosses.read"]
# And once more before they meet again: each has added up a slice then.
TOGETHER = [*ALONE, "host_memory.py:HostMemoryCarriage.copy_sums_to_host"]
MODELS = [
    {"norm": True, "dropout": 0.2},
    {"norm": False, "dropout": 0.0},
]


@pytest.mark.slow
@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("model", MODELS)
def test_a_trainer_and_a_run_wait_once_a_step(accelerator, loss, model):
    assert waits_of_trainer(loss, **model) == [ALONE] * WATCHED
    assert waits_of_run(loss, **model) == [ALONE] * WATCHED


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "more"),
    [
        ({"precision": "bf16"}, []),
        ({"clip_value": 0.1}, []),
        ({"clip_norm": 0.1}, ["item: transforms.py:clip_norms"]),
        ({"precision": "fp16"}, ["item: loss_scaling.py:LossScaling.unscale"]),
    ],
)
def test_options_read_one_number_at_most(accelerator, options, more):
    for step in waits_of_trainer(**options):
        assert sorted(step) == sorted([*ALONE, *more])


def of_all(options):
    return [waits_of_trainer(**options), waits_of_run()]


@pytest.mark.slow
@pytest.mark.parametrize("workers", [2, 3])
@pytest.mark.parametrize("options", [{}, {"precision": "bf16", "loss": "sums"}])
def test_workers_wait_twice_a_step(workers, options):
    skip_without(ACCELERATED)
    # Without recovery there are no snapshots, which wait.
    for found in unisono.launch(of_all, options, workers=workers, restarts=0):
        assert found == [[TOGETHER] * WATCHED] * 2


def test_memory_that_is_copied_is_not_given_to_others(accelerator):
    device = Device(torch.device("sim", 0))
    copies, host = device.copies(), torch.zeros(1000).pin_memory()
    copies.to_host(host, torch.ones(1000, device=device.torch))
    torch.zeros(1000, device=device.torch)  # raises where it could be the same memory
    copies.wait()
    assert host.all()


@computed_once()
def test_nothing_is_under_way_when_a_loop_fails(accelerator):
    def loss(model, batch):
        if len(calls) == 2:
            raise KeyError("a loss that fails")
        calls.append(1)
        return there.loss_of(model, batch)

    calls = []
    with contextlib.suppress(KeyError):
        there.make("sim", loss=loss).fit(there.data(), **there.FIT)
    assert sim.pending_copies(0) == 0
