"""Gradients of a step under way are the run's: what would not count is refused where it is done."""

import copy
import queue

import pytest
import torch
from tests.classified import at_random, taken
from tests.classified import cross_entropy as loss_of
from tests.promises import promise
from torch import nn

import unisono

RATE = 0.1


def data(num_samples=42):
    return at_random(num_samples, 8, 4, seed=3)


def make(optimizer=torch.optim.SGD, shards=2, **options):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 5), nn.ReLU(), nn.Linear(5, 4))
    made = optimizer(model.parameters(), lr=RATE)
    return unisono.Run(model, made, shards=shards, **options)


def train(run, *, after_shard=lambda run: None, after_shards=lambda run: None, steps=2):
    for step in run.steps(data(), batch_size=10, steps=steps):
        with step:
            for batch in step.shards:
                step.backward(loss_of(run.model, batch))
                after_shard(run)
            after_shards(run)
    return [parameter.detach().clone() for parameter in run.model.parameters()]


def freeze_a_layer(run):
    for parameter in run.model[0].parameters():
        parameter.grad = None


def replace(run):
    run.model[2].weight.grad = torch.zeros_like(run.model[2].weight)


def clip_by_hand(run):
    for parameter in run.model.parameters():
        if parameter.grad is not None:
            parameter.grad.clamp_(-1, 1)


EDITS = {
    "clip_grad_norm_": lambda run: nn.utils.clip_grad_norm_(run.model.parameters(), 1e-3),
    "clip_grad_value_": lambda run: nn.utils.clip_grad_value_(run.model.parameters(), 1e-3),
    "clamp_": clip_by_hand,
    "zero_": lambda run: run.model[0].weight.grad.zero_(),
    "data": lambda run: run.model[0].weight.grad.data.mul_(0.5),
    "item": lambda run: run.model[0].weight.grad.__setitem__(0, 0.0),
    "norm": lambda run: run.model[0].weight.grad.norm(),
    "step": lambda run: run.optimizer.step(),
    "None": freeze_a_layer,
    "another": replace,
}


@promise("one-result.12")
@pytest.mark.parametrize("edit", EDITS)
@pytest.mark.parametrize("moment", ["after_shard", "after_shards"])
@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.Adafactor])
def test_an_edit_of_gradients_is_refused_with_the_way_out(edit, moment, optimizer):
    with pytest.raises(RuntimeError) as caught:
        train(make(optimizer), **{moment: EDITS[edit]})
    said = str(caught.value)
    name = "2.weight" if edit == "another" else "0.weight"
    assert said.startswith(f"the gradient of `{name}` must be left to the run")
    way = {"clip": "`step.gradient_norm`", "step": "leave `optimizer.step()` out"}
    assert way.get(edit[:4], "`register_hook`") in said


@promise("one-result.12")
@pytest.mark.parametrize("edit", EDITS)
@pytest.mark.parametrize("moment", ["after_shard", "after_shards"])
def test_an_edit_that_begins_later_is_refused_within_64_steps(edit, moment):
    run, message = make(shards=1), "must be left to the run|another `backward` has left some"

    def act(run):
        if run.position.step >= 5:
            EDITS[edit](run)

    with pytest.raises((RuntimeError, AttributeError, TypeError), match=message + "|'NoneType'"):
        train(run, steps=100, **{moment: act})
    assert run.position.step <= (5 if "clip" in edit or edit == "step" else 64)


@pytest.mark.parametrize("moment", ["after_shard", "after_shards"])
def test_another_backward_is_refused(moment):
    with pytest.raises(RuntimeError, match="another `backward` has left some"):
        train(make(), **{moment: lambda run: loss_of(run.model, data()[:4]).backward()})


def look(run):
    assert "`0.weight`" in repr(run.model[0].weight.grad)
    assert "left to the run" in str(run.model[0].weight.grad)


@pytest.mark.parametrize("moment", ["after_shard", "after_shards"])
@pytest.mark.parametrize("act", [look, lambda run: run.optimizer.zero_grad()])
def test_looking_and_zeroing_as_always_do_no_harm(moment, act):
    untouched = train(make(torch.optim.Adam))
    assert all(map(torch.equal, train(make(torch.optim.Adam), **{moment: act}), untouched))


def test_there_are_no_gradients_between_steps_and_after_a_refusal():
    run = make()
    for _ in taken(run, loss_of, data(), batch_size=10, steps=2):
        assert all(parameter.grad is None for parameter in run.model.parameters())
    with pytest.raises(RuntimeError, match="must be left to the run"):
        train(run, after_shard=EDITS["clip_grad_norm_"], steps=4)
    assert all(parameter.grad is None for parameter in run.model.parameters())
    loss_of(run.model, data()[:4]).backward()
    assert run.model[0].weight.grad.norm() > 0


def mask(run):
    keep = torch.ones(5, 8)
    keep[:, ::2] = 0
    run.model[0].weight.register_hook(lambda gradient: gradient * keep)
    return keep


def test_a_mask_in_a_gradient_hook_is_that_of_a_plain_loop():
    run = make(shards=1)
    keep, start = mask(run), run.model[0].weight.detach().clone()
    plain = nn.Sequential(nn.Linear(8, 5), nn.ReLU(), nn.Linear(5, 4))
    plain.load_state_dict(run.model.state_dict())
    optimizer = torch.optim.SGD(plain.parameters(), lr=RATE)
    for step in run.steps(data(), batch_size=10, steps=4):
        with step:
            for batch in step.shards:
                step.backward(loss_of(run.model, batch))
                optimizer.zero_grad()
                loss_of(plain, batch).backward()
                plain[0].weight.grad *= keep
                optimizer.step()
    for one, other in zip(run.model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one, other)
    assert torch.equal(run.model[0].weight[:, ::2], start[:, ::2])


def with_hooks(kind, steps=5, **options):
    run = make(shards=4, **options)
    if kind == "register_hook":
        mask(run)
    else:

        def clamp(parameter):
            parameter.grad.clamp_(-1e-2, 1e-2)

        run.model[0].weight.register_post_accumulate_grad_hook(clamp)
    return [parameter.tolist() for parameter in train(run, steps=steps)]


@promise("one-result.17")
def test_a_hook_sees_the_gradient_of_each_shard_weighted_by_its_share():
    run, seen, batches = make(shards=2), queue.SimpleQueue(), []
    plain = copy.deepcopy(run.model)
    run.model[0].weight.register_hook(lambda gradient: seen.put(gradient.clone()))
    for step in run.steps(data(7), batch_size=7, steps=1):
        with step:
            for batch in step.shards:
                batches.append(batch)
                step.backward(loss_of(run.model, batch))
    found = [seen.get_nowait() for _ in range(seen.qsize())]
    assert found
    for inputs, labels in batches:
        (own,) = torch.autograd.grad(loss_of(plain, (inputs, labels)), plain[0].weight)
        assert any(torch.allclose(one, own * len(inputs) / 7) for one in found)
        assert not any(torch.allclose(one, own) for one in found)
