"""Collectives of torch.distributed in a program that trains: refused in passes, allowed between."""

import contextlib

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import torch.distributed.nn.functional as differentiable
from tests.promises import promise
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

import unisono

BACKENDS = ("gloo", "unisono")
REFUSED = "collectives must be called between steps, but `{}` was called in a pass over a shard: "


@pytest.fixture(params=BACKENDS)
def group(request, tmp_path):
    with a_group(request.param, f"file://{tmp_path}/store"):
        yield


@contextlib.contextmanager
def a_group(backend, where=None, **place):
    place = place or ({"rank": 0, "world_size": 1} if where else {})
    dist.init_process_group(backend, where, **place)
    try:
        yield
    finally:
        dist.destroy_process_group()


def data():
    return TensorDataset(torch.arange(48.0).view(12, 4) / 48)


def trainer_of(loss=None, model=None, shards=3, **options):
    torch.manual_seed(0)
    model = nn.Linear(4, 2) if model is None else model
    optimizer = options.pop("optimizer", torch.optim.SGD)(model.parameters(), lr=0.1)
    return unisono.Trainer(model, optimizer, loss or plain, shards=shards, **options)


def plain(model, batch):
    return model(batch[0]).square().mean()


def gathers(features):
    parts = [torch.zeros_like(features) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, features.detach())
    return torch.cat(parts)


CALLS = {
    "all_gather": gathers,
    "all_reduce": lambda features: dist.all_reduce(features.detach()),
    "broadcast": lambda features: dist.broadcast_object_list([1]),
    "barrier": lambda features: dist.barrier(),
    "send": lambda features: dist.group.WORLD.send([features.detach()], 0, 0),
}


@promise("one-result.11")
@pytest.mark.parametrize("name", CALLS)
def test_a_loss_that_calls_a_collective_is_refused_in_the_first_step(group, name):
    def loss(model, batch):
        features = model(batch[0])
        CALLS[name](features)
        return features.square().mean()

    trainer = trainer_of(loss)
    for mode in (contextlib.nullcontext, torch.no_grad):
        with mode(), pytest.raises(RuntimeError, match=REFUSED.format(name)):
            trainer.fit(data(), batch_size=6, steps=2)
    assert trainer.run.position.step == 0


def in_inference_mode(outputs):
    with torch.inference_mode():
        dist.all_reduce(torch.ones(2))
    return outputs.square().mean()


def in_the_backward_pass(outputs):
    outputs.register_hook(lambda gradient: dist.all_reduce(gradient))
    return outputs.square().mean()


@pytest.mark.filterwarnings("ignore:torch.distributed.nn.functional:FutureWarning")
@pytest.mark.parametrize(
    "call",
    [
        lambda outputs: functional.all_reduce(outputs.mean(), "sum", dist.group.WORLD),
        lambda outputs: differentiable.all_reduce(outputs.mean()),
        in_inference_mode,
        in_the_backward_pass,
    ],
)
def test_collectives_in_other_ways_are_refused_as_well(group, call):
    trainer = trainer_of(lambda model, batch: call(model(batch[0])))
    with pytest.raises(RuntimeError, match=REFUSED.format("all_reduce")):
        trainer.fit(data(), batch_size=6, steps=1)


def test_a_collective_in_a_loop_over_shards_is_refused(group):
    model = nn.Linear(4, 2)
    run = unisono.Run(model, torch.optim.SGD(model.parameters(), lr=0.1), shards=3)
    with pytest.raises(RuntimeError, match=REFUSED.format("barrier")):
        for step in run.steps(data(), batch_size=6, steps=1):
            with step:
                for batch in step.shards:
                    step.backward(plain(model, batch))
                    dist.barrier()
    dist.barrier()  # once the loop is left


def test_evaluation_and_prediction_refuse_them_too(group):
    trainer = trainer_of(lambda model, batch: gathers(model(batch[0])).mean())
    with pytest.raises(RuntimeError, match=REFUSED.format("all_gather")):
        trainer.evaluate(data(), batch_size=6)
    with pytest.raises(RuntimeError, match=REFUSED.format("all_gather")):
        trainer.predict(data(), batch_size=6, forward=lambda m, batch: gathers(m(batch[0])))
    dist.barrier()


@promise("one-result.11")
def test_an_optimizer_that_calls_a_collective_is_refused(group):
    class Exchanging(torch.optim.SGD):
        def step(self, closure=None):
            for group in self.param_groups:
                for parameter in group["params"]:
                    dist.all_reduce(parameter.grad)
            return super().step(closure)

    with pytest.raises(RuntimeError, match="`all_reduce` was called in the optimizer's step: "):
        trainer_of(optimizer=Exchanging).fit(data(), batch_size=6, steps=1)


@promise("one-result.11")
@pytest.mark.parametrize(
    "wrap", [DistributedDataParallel, unisono.distributed.DistributedDataParallel]
)
@pytest.mark.parametrize("inside", [False, True])
def test_a_model_in_ddp_is_refused_with_the_way_out(group, wrap, inside):
    model = wrap(nn.Linear(4, 2))
    words = r"`0` is wrapped in DistributedDataParallel" if inside else "it is wrapped in Distr"
    with pytest.raises(ValueError, match=f"`model` must be the plain model.*{words}.*pass what it"):
        trainer_of(model=nn.Sequential(model) if inside else model)
    trainer_of(model=model.module).fit(data(), batch_size=6, steps=1)


def test_callbacks_and_the_rest_of_a_step_may_call_collectives(group):
    seen = []

    class Averaging(unisono.callbacks.Callback):
        def on_step_end(self, fit, step):
            number = torch.tensor(step.loss)
            dist.all_reduce(number)
            seen.append(number.item())

    trainer = trainer_of(callbacks=[Averaging()])
    trainer.fit(data(), batch_size=6, steps=2)
    assert len(seen) == 2
    model = nn.Linear(4, 2)
    run = unisono.Run(model, torch.optim.SGD(model.parameters(), lr=0.1), shards=3)
    for step in run.steps(data(), batch_size=6, steps=1):
        with step:
            for batch in step.shards:
                step.backward(plain(model, batch))
            dist.barrier()
        dist.barrier()


def test_after_a_loss_that_failed_collectives_are_allowed_again(group):
    def loss(model, batch):
        raise KeyError("mine")

    trainer = trainer_of(loss)
    for act in (trainer.fit, trainer.evaluate):
        with pytest.raises(KeyError):
            act(data(), batch_size=6, **({"steps": 1} if act == trainer.fit else {}))
        dist.barrier()


def test_nothing_stands_before_collectives_once_a_loop_has_ended(group):
    trainer_of().fit(data(), batch_size=6, steps=1)
    assert "BackendSelect" not in torch._C._dispatch_dump("c10d::allreduce_")


def refusal(backend):
    def loss(model, batch):
        return gathers(model(batch[0])).mean()

    size = unisono.world().world_size
    with a_group(backend) if size > 1 else contextlib.nullcontext():
        with pytest.raises(RuntimeError) as caught:
            trainer_of(loss, shards=8).fit(data(), batch_size=8, epochs=1)
        return str(caught.value)


@pytest.mark.slow
@pytest.mark.parametrize("backend", BACKENDS)
def test_every_worker_refuses_alike(backend):
    (said,) = set(unisono.launch(refusal, backend, workers=3))
    assert "`all_gather` was called in a pass over a shard" in said
