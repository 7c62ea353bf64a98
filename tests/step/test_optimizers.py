"""Updating without what torch wraps around an optimizer's ``step``."""

import functools
import types

import pytest
import torch

import unisono
from unisono.engine.state.optimizers import ELEMENTWISE, bare_step, is_elementwise
from unisono.engine.step.update import Options


def make(kind=torch.optim.Adam, **options):
    torch.manual_seed(0)
    parameter = torch.nn.Parameter(torch.randn(5))
    return parameter, kind([parameter], lr=0.1, **options)


def train(model, optimizer):
    def loss(model, batch):
        return model(batch[0]).square().mean()

    data = torch.utils.data.TensorDataset(torch.randn(8, 3))
    unisono.Trainer(model, optimizer, loss, shards=1).fit(data, batch_size=4, epochs=1)


@pytest.mark.parametrize("kind", ELEMENTWISE, ids=lambda kind: kind.__name__)
def test_it_is_the_step_of_the_optimizer_itself(kind):
    (mine, bare), (theirs, whole) = make(kind), make(kind)
    step = bare_step(bare)
    assert step.func.__code__.co_filename.endswith(f"{kind.step.__module__.split('.')[-1]}.py")
    for _ in range(3):
        mine.grad, theirs.grad = mine.detach().cos(), theirs.detach().cos()
        with torch.no_grad():
            step()
        whole.step()
    assert torch.equal(mine, theirs)


@pytest.mark.parametrize("kind", ELEMENTWISE, ids=lambda kind: kind.__name__)
def test_schedules_leave_it_bare_and_cut_into_pieces(kind):
    _, optimizer = make(kind)
    for _ in range(2):
        torch.optim.lr_scheduler.StepLR(optimizer, 1)
    assert bare_step(optimizer).func is bare_step(make(kind)[1]).func
    assert is_elementwise(optimizer)


def test_a_schedule_stays_one_when_the_class_loses_its_profiling(monkeypatch):
    _, optimizer = make()
    torch.optim.lr_scheduler.StepLR(optimizer, 1)
    # The schedule's wrapper goes on calling what was there before.
    monkeypatch.setattr(torch.optim.Adam, "step", torch.optim.Adam.step.__wrapped__)
    assert is_elementwise(optimizer)


@pytest.mark.slow
def test_a_profiler_sees_the_optimizer():
    model = torch.nn.Linear(3, 2)
    cpu = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=cpu, acc_events=True) as profile:  # else 2.11 warns
        train(model, torch.optim.Adam(model.parameters()))
    counts = {event.key: event.count for event in profile.key_averages()}
    # Twice, and once for the probe of what state there will be.
    assert counts["Optimizer.step#Adam.step"] == 3


def count_calls(owner, calls):
    """Put something around ``step`` of an optimizer or of its class; returns it."""
    inner = owner.step

    @functools.wraps(inner)
    def step(*arguments):
        calls.append(len(arguments))
        return inner(*arguments)

    return step


@pytest.mark.parametrize("schedule", ["none", "before", "after"])
def test_what_a_program_has_put_around_step_is_called(schedule):
    model, calls = torch.nn.Linear(3, 2), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if schedule == "before":
        torch.optim.lr_scheduler.StepLR(optimizer, 1)
    step = count_calls(optimizer, calls)
    optimizer.step = types.MethodType(lambda _: step(), optimizer)
    if schedule == "after":
        torch.optim.lr_scheduler.StepLR(optimizer, 1)
    elif schedule == "before":
        optimizer.step = functools.wraps(step)(lambda: step())
    assert not is_elementwise(optimizer)
    train(model, optimizer)
    assert calls == [0, 0]  # once for each of two steps


def test_what_a_program_has_put_around_the_step_of_a_class_is_called(monkeypatch):
    model, calls = torch.nn.Linear(3, 2), []
    monkeypatch.setattr(torch.optim.SGD, "step", count_calls(torch.optim.SGD, calls))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    assert not is_elementwise(optimizer)
    train(model, optimizer)
    assert calls == [1, 1]


def test_what_is_taken_off_again_leaves_nothing_behind(monkeypatch):
    _, optimizer = make()
    with monkeypatch.context() as patch:
        patch.setattr(torch.optim.Adam, "step", count_calls(torch.optim.Adam, []))
        patch.setattr(optimizer, "step", count_calls(optimizer, []), raising=False)
        assert not is_elementwise(optimizer)
    vars(optimizer).pop("step", None)
    assert is_elementwise(optimizer)


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("lr", lambda group: group["lr"].mul_(0.5)),
        ("betas", lambda group: group["betas"][0].mul_(0.5)),
        ("weights", lambda group: group["weights"].append(2.0)),
        ("added", lambda group: group.update(added=1)),
        ("eps", lambda group: group.pop("eps")),
    ],
)
def test_any_option_that_a_pass_changes_is_named_and_compared(name, change):
    _, optimizer = make(betas=(torch.tensor(0.9), torch.tensor(0.99)), capturable=True)
    (group,) = optimizer.param_groups
    group.update(lr=torch.tensor(0.1), weights=[1.0])
    options = Options(optimizer)
    before = options.note()
    assert options.note() == before
    options.check()
    change(group)
    with pytest.raises(RuntimeError, match=f"they set `{name}` of the optimizer"):
        options.check()
    assert options.note() != before


@pytest.mark.parametrize(
    ("name", "before", "after"),
    [
        ("lr", torch.tensor(0.1), 0.2),
        ("lr", torch.tensor(0.1), torch.tensor(0.1).item()),
        ("lr", torch.tensor(0.1), torch.tensor(0.1, dtype=torch.float64)),
        ("lr", 0.1, torch.tensor(0.2)),
        ("betas", (torch.tensor(0.9), torch.tensor(0.99)), (torch.tensor(0.9), 0.99)),
    ],
)
def test_an_option_stays_a_tensor_or_a_number_while_a_loop_is_under_way(name, before, after):
    _, optimizer = make()
    (group,) = optimizer.param_groups
    group[name] = before
    options = Options(optimizer)
    options.note()
    group[name] = after
    with pytest.raises(RuntimeError, match=f"must stay a number, or a tensor .* `{name}` was"):
        options.note()
