"""Programs that change parameters themselves: a plain loop's bits, refusals, kills between steps.

What they come to in every way of running them is in the catalogue (`tests.programs`).
"""

import os
import signal

import pytest
import torch
from tests.classified import at_random
from tests.classified import cross_entropy as loss_of
from tests.programs import given
from tests.programs.given import Between
from tests.promises import promise
from torch import nn
from torch.optim import SGD, Adam

import unisono


def data():
    return at_random(43, 8, 4, seed=3)


def net():
    return nn.Sequential(nn.Linear(8, 150), nn.ReLU(), nn.Linear(150, 4))


def averaged_in_data(model, _):
    for target, online in model.pairs():
        target.data = target.data * 0.8 + online.data * 0.2


def clipped(model, _):
    for parameter in model.parameters():
        parameter.data = parameter.data.clamp(-0.2, 0.2)


def drawn(model, _):
    for parameter in model.parameters():
        parameter.data.add_(torch.randn(parameter.shape), alpha=0.01)


def halved(_, optimizer):
    for state in optimizer.state.values():
        state["exp_avg"].mul_(0.5)
        state["step"].mul_(0.5)


class Twins(given.Twins):
    def __init__(self):
        super().__init__(net)


class Moved(Twins):
    """MoCo: moves its key encoder in each forward pass."""

    def forward(self, inputs):
        if self.training:
            averaged_in_data(self, None)
        return super().forward(inputs)


class Drawing(SGD):
    """Draws whole updates."""

    @torch.no_grad()
    def step(self, closure=None):
        super().step(closure)
        for parameter in self.param_groups[0]["params"]:
            parameter.add_(torch.rand(parameter.shape), alpha=0.01)


def make(model=net, optimizer=Adam, loss=loss_of, **options):
    torch.manual_seed(0)
    model = model()
    made = optimizer([p for p in model.parameters() if p.requires_grad], lr=0.01)
    return unisono.Trainer(model, made, loss, shards=4, **options)


def by_callback(change, **options):
    trainer = make(callbacks=[Between(change)], **options)
    trainer.fit(data(), batch_size=10, steps=4)
    return trainer.digest()


def in_data(weight):
    weight.data.mul_(0.9)


def anew(weight):
    weight.data = weight.data * 0.9


def by_version(weight):
    with torch.no_grad():
        weight.mul_(0.9)


@promise("one-result.10")
@pytest.mark.slow
@pytest.mark.parametrize("change", [in_data, anew, by_version])
@pytest.mark.parametrize("workers", [None, 2])
def test_passes_that_change_trained_parameters_are_refused(change, workers):
    def loss(model, batch):
        change(model[2].weight)
        return loss_of(model, batch)

    def train():
        make(loss=loss).fit(data(), batch_size=10, steps=2)

    with pytest.raises(RuntimeError, match=r"passes must leave .* but `2\.weight` was changed"):
        train() if workers is None else unisono.launch(train, workers=workers)


def test_what_passes_move_has_the_bits_of_a_plain_loop():
    ours, plain, batches = make(Moved, SGD, lambda *_: None).run.model, Moved(), []
    plain.load_state_dict(ours.state_dict())
    run = unisono.Run(ours, SGD(ours.net.parameters(), lr=0.1), shards=1)
    for step in run.steps(data(), batch_size=10, steps=4):
        with step:
            for batch in step.shards:
                batches.append(batch)
                step.backward(loss_of(ours, batch))
    optimizer = SGD(plain.net.parameters(), lr=0.1)
    for batch in batches:
        optimizer.zero_grad()
        loss_of(plain, batch).backward()
        optimizer.step()
    for here, there in zip(ours.parameters(), plain.parameters(), strict=True):
        assert torch.equal(here, there)


@pytest.mark.parametrize("change", [in_data, anew, by_version])
@pytest.mark.parametrize("begin", [4, 5])
def test_what_passes_move_late_is_refused(change, begin):
    """In step 4 it is rehearsed, too, but only what is changed by assignment is put back."""

    def loss(model, batch):
        if unisono.progress().step >= begin:
            change(model.target[2].weight)
        return loss_of(model, batch)

    with pytest.raises(RuntimeError, match=r"`target\.2\.weight` (was first seen|carries)"):
        make(Twins, SGD, loss).fit(data(), batch_size=10, steps=66)


class Killed(Between):
    """Kills a worker once, behind or before a change."""

    def __init__(self, change, rank, mark, *, is_changed):
        super().__init__(change)
        self.rank, self.mark, self.is_changed = rank, mark, is_changed

    def on_step_end(self, fit, step):
        if self.is_changed:
            self.change(fit.model, fit.optimizer)
        if step.number == 2 and unisono.world().rank == self.rank and not self.mark.exists():
            self.mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        if not self.is_changed:
            self.change(fit.model, fit.optimizer)


class Shifted(nn.Sequential):
    """Adds a buffer, which the program changes between steps."""

    def __init__(self):
        super().__init__(*net())
        self.register_buffer("shift", torch.zeros(8))

    def forward(self, inputs):
        return super().forward(inputs + self.shift)


def shifted(model, _):
    model.shift = model.shift + torch.rand(8)


KILLED = [
    (clipped, {}),
    (halved, {}),
    (averaged_in_data, {"model": Moved}),
    (drawn, {"optimizer": Drawing}),
    (shifted, {"model": Shifted}),
]


def with_a_kill(program, rank, mark, directory):
    change, options = KILLED[program]
    killed = Killed(change, rank, mark, is_changed=program % 2 == 0)
    trainer = make(callbacks=[killed], directory=directory, **options)
    trainer.fit(data(), batch_size=10, steps=5)
    return trainer.digest()


def gone_on(program, directory):
    change, options = KILLED[program]
    trainer = make(callbacks=[Between(change)], directory=directory, **options)
    trainer.fit(data(), batch_size=10, steps=7)
    return trainer.digest()


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("program", range(len(KILLED)))
def test_kills_and_resumes_change_nothing_of_it(tmp_path, program, rank):
    mark, kept = tmp_path / "killed", tmp_path / "run"
    expected = {with_a_kill(program, -1, mark, None)}
    assert set(unisono.launch(with_a_kill, program, rank, mark, kept, workers=3)) == expected
    assert mark.exists()
    if rank == 1:
        resumed = unisono.launch(gone_on, program, kept, workers=2)
        assert set(resumed) == {gone_on(program, None)}


def with_buffers(optimizer, faults):
    os.environ["UNISONO_FAULTS"] = faults
    return by_callback(shifted, model=Shifted, optimizer=optimizer)


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", [Adam, Drawing])
def test_a_leader_lost_before_the_last_snapshot_is_described_by_the_next(monkeypatch, optimizer):
    monkeypatch.setenv("UNISONO_FAULTS", "")
    expected = with_buffers(optimizer, "")
    found = unisono.launch(with_buffers, optimizer, "kill:rank=0,step=3,at=commit", workers=3)
    assert found == [expected] * 3


class Written(nn.Sequential):
    """Writes to its weight in each pass what is there already."""

    def forward(self, images):
        self[0].weight.data.clamp_(-100.0, 100.0)
        return super().forward(images)


def test_what_a_pass_writes_without_a_change_hides_no_update(monkeypatch):
    found = set()
    for model in (net, lambda: Written(*net())):
        for exchange in ("shared", "staged"):
            monkeypatch.setenv("UNISONO_EXCHANGE", exchange)
            trainer = make(model, optimizer=SGD)
            trainer.fit(data(), batch_size=8, steps=6)
            values = [value.tolist() for value in trainer.run.model.state_dict().values()]
            found.add(str(values))
    assert len(found) == 1
