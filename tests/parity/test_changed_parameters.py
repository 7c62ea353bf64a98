"""Programs that change parameters or optimizer state themselves: changed once, on any number."""

import copy
import functools
import itertools
import os
import signal

import numpy as np
import pytest
import torch
from tests.chaos.exchanges import device_of, install, skip_without, variables_of
from tests.classified import at_random, taken
from tests.classified import cross_entropy as loss_of
from tests.parity import keeping_programs as keeping
from tests.parity.keeping_programs import (
    Between,
    Langevin,
    averaged_by_numpy,
    averaged_in_data,
    clipped,
    drawn,
    halved,
)
from tests.promises import promise
from torch import nn
from torch.optim import SGD, Adam

import unisono


def data():
    return at_random(43, 8, 4, seed=3)


def net():
    return nn.Sequential(nn.Linear(8, 150), nn.ReLU(), nn.Linear(150, 4))


Twins, Moved = (functools.partial(kind, net) for kind in (keeping.Twins, keeping.Moved))


def make(model=net, optimizer=Adam, loss=loss_of, device="cpu", **options):
    torch.manual_seed(0)
    model = model()
    made = optimizer([p for p in model.parameters() if p.requires_grad], lr=0.01)
    return unisono.Trainer(model, made, loss, shards=4, device=device, **options)


def by_callback(change, device, **options):
    trainer = make(device=device, callbacks=[Between(change)], **options)
    trainer.fit(data(), batch_size=10, steps=4)
    return trainer.digest()


def by_loop(change, device, **options):
    trainer = make(device=device, **options)
    run = trainer.run
    for _ in taken(run, loss_of, data(), batch_size=10, steps=4):
        change(run.model, run.optimizer)
    return trainer.digest()


def averaged_without_gradients(model, _):
    with torch.no_grad():
        for target, online in model.pairs():
            target.lerp_(online, 0.2)


def clamped(model, _):
    for parameter in model.parameters():
        parameter.data.clamp_(-0.2, 0.2)


def momentum_replaced(_, optimizer):
    for state in optimizer.state.values():
        state["exp_avg"] = state["exp_avg"] * 0.5


def state_forgotten(_, optimizer):
    if len(optimizer.state) and int(next(iter(optimizer.state.values()))["step"]) == 2:
        optimizer.state.clear()


def state_loaded(_, optimizer):
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))


def noise_on_gradients(device):
    """A hook that draws."""
    trainer = make(device=device)

    def hook(optimizer, args, kwargs):
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad += torch.randn(parameter.shape).to(parameter.device)

    trainer.run.optimizer.register_step_pre_hook(hook)
    trainer.fit(data(), batch_size=10, steps=4)
    return trainer.digest()


TRAINED = [clamped, clipped, drawn]
STATE = [halved, momentum_replaced, state_forgotten, state_loaded]
TARGETS = [averaged_without_gradients, averaged_in_data, averaged_by_numpy]


class MovedNowAndThen(keeping.Twins):
    """Moves its slow net in place, for some batches."""

    def __init__(self):
        super().__init__(net)

    def forward(self, inputs):
        if self.training and inputs[0, 0] > 0:
            for target, online in self.pairs():
                target.data.mul_(0.8).add_(online.data, alpha=0.2)
        return super().forward(inputs)


def nothing(*_):
    pass


def moved_by_a_hook(device):
    """An optimizer's hook moves what passes move, too."""
    trainer = make(Moved, device=device)

    def hook(optimizer, args, kwargs):
        averaged_without_gradients(trainer.run.model, optimizer)

    trainer.run.optimizer.register_step_post_hook(hook)
    trainer.fit(data(), batch_size=10, steps=4)
    return trainer.digest()


def digests(device="cpu"):
    install(device)
    ways = itertools.cycle((by_callback, by_loop))
    found = {each.__name__: next(ways)(each, device) for each in (*TRAINED, *STATE)}
    found |= {each.__name__: next(ways)(each, device, model=Twins) for each in TARGETS}
    found["whole"] = by_callback(clipped, device, optimizer=Langevin)
    found["hook"] = noise_on_gradients(device)
    found["moved"] = by_loop(nothing, device, model=Moved)
    found["moved now and then"] = by_callback(nothing, device, model=MovedNowAndThen)
    found["moved twice"] = by_callback(averaged_by_numpy, device, model=Moved)
    found["moved, whole"] = by_callback(nothing, device, model=Moved, optimizer=Langevin)
    found["moved by a hook"] = moved_by_a_hook(device)
    return found


@functools.cache
def alone():
    found = digests()
    assert found["clamped"] == found["clipped"]
    assert found["averaged_in_data"] == found["averaged_by_numpy"]
    assert len(set(found.values())) == len(found) - 2
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("exchange", "workers"), [("shared", 2), ("shared", 3), ("staged", 2), ("gloo", 2), ("sim", 2)]
)
def test_what_a_program_changes_between_steps_is_changed_once(monkeypatch, exchange, workers):
    skip_without(exchange)
    for variable, value in variables_of(exchange).items():
        monkeypatch.setenv(variable, value)
    for found in unisono.launch(digests, device_of(exchange), workers=workers):
        assert found == alone()


def drawn_without_a_seed(model, _):
    noise = torch.from_numpy(np.random.default_rng().normal(size=(4, 150)))
    model[2].weight.data.add_(noise.to(model[2].weight.device, torch.float32))


def by_rank(_, optimizer):
    for state in optimizer.state.values():
        state["exp_avg"].mul_(0.9 - 0.1 * unisono.world().rank)


def on_one_rank(model, _):
    if unisono.world().rank == 1:
        model[2].bias.data.zero_()


def rate_of_the_rank(_, optimizer):
    optimizer.param_groups[0]["lr"] = 0.1 + unisono.world().rank


def shifted_on_one_rank(model, _):
    if unisono.world().rank == 0:
        model.shift[2] = 0.5


def shifted_by_rank(model, _):
    model.shift = model.shift + unisono.world().rank


def with_a_shift(change, device):
    install(device)
    return by_callback(change, device, model=Shifted)


@promise("one-result.6")
@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "name"),
    [
        (drawn_without_a_seed, "`2.weight`"),
        (by_rank, "`exp_avg/0"),
        (on_one_rank, "2.bias`"),
        (rate_of_the_rank, "an optimizer's options .* where shards 0 and 2 are computed"),
        (shifted_on_one_rank, r"change of shift|`shift`"),
        (shifted_by_rank, r"change of shift|`shift`"),
    ],
)
@pytest.mark.parametrize("exchange", ["shared", "staged", "gloo", "sim"])
def test_workers_that_change_something_else_are_told_the_name(monkeypatch, exchange, change, name):
    skip_without(exchange)
    for variable, value in variables_of(exchange).items():
        monkeypatch.setenv(variable, value)
    with pytest.raises(unisono.errors.MismatchError, match=name):
        unisono.launch(with_a_shift, change, device_of(exchange), workers=2)


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
    (drawn, {"optimizer": Langevin}),
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
    return by_callback(shifted, "cpu", model=Shifted, optimizer=optimizer)


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", [Adam, Langevin])
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
