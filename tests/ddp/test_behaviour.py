"""What programs do with DDP: hooks, accumulation, join, pickling, groups, sparse gradients."""

import copy
import gc
import inspect
import io
import re
import weakref

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from tests.ddp.training import CLASSES, data, digest, made, train
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import (
    allreduce_hook,
    fp16_compress_hook,
)
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import unisono
from unisono.distributed.averaging import mean_in_order
from unisono.errors import MismatchError
from unisono.plan.summation import tree_sum

pytestmark = pytest.mark.slow
BACKENDS = pytest.mark.parametrize("backend", ["unisono", "gloo"])


def test_the_signature_is_torchs():
    assert issubclass(unisono.distributed.DistributedDataParallel, TorchDDP)
    ours = inspect.signature(unisono.distributed.DistributedDataParallel)
    assert ours == inspect.signature(TorchDDP)


def means():
    rank, world_size = dist.get_rank(), dist.get_world_size()
    found = []
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.complex64):
        for numel in (1, 2, 3, 4, 1000, 10_001):
            every = [
                torch.randn(numel, generator=torch.Generator().manual_seed(r)).to(dtype)
                for r in range(world_size)
            ]
            mine = every[rank].clone()
            mean_in_order(mine, dist.group.WORLD, world_size)
            expected = tree_sum([one * (1 / world_size) for one in every], torch.add)
            found.append(torch.equal(mine, expected))
    return found


@pytest.mark.parametrize("world_size", [3, pytest.param(5, marks=pytest.mark.long)])
@BACKENDS
def test_a_mean_is_the_trees_for_every_dtype_and_size(on_ranks, backend, world_size):
    assert all(all(found) for found in on_ranks(backend, world_size, means))


def gradients(ddp, step=0):
    x, y = data(step)
    nn.functional.cross_entropy(ddp(x), y).backward()
    return [parameter.grad.clone() for parameter in ddp.parameters()]


def equal(some, others):
    return all(torch.equal(one, other) for one, other in zip(some, others, strict=True))


def nothing_but_mine(state, bucket):
    state.append(bucket.index())
    future = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


def use_hooks(is_late):
    options = {"gradient_as_bucket_view": True}  # so that ours is there on every backend
    ddp, local, seen = made(**options), made(**options).module, []
    if is_late:
        gradients(ddp)
        ddp.zero_grad()
    ddp.register_comm_hook(seen, nothing_but_mine)
    assert equal(gradients(ddp), gradients(local))
    assert seen
    assert ddp._get_ddp_logging_data()["comm_hook"] == "nothing_but_mine"
    with pytest.raises(RuntimeError, match="can only be called once"):
        ddp.register_comm_hook(None, allreduce_hook)
    refused = made()
    with pytest.raises(TypeError, match="must be callable"):
        refused.register_comm_hook(None, 1)
    assert not refused._is_left_to_a_hook

    by_name, by_function = made(**options), made(**options)
    by_name._register_builtin_comm_hook(dist.BuiltinCommHookType.ALLREDUCE)
    by_function.register_comm_hook(None, allreduce_hook)
    for _ in range(2):
        assert all(
            torch.allclose(a, b, rtol=1e-4, atol=1e-6)
            for a, b in zip(gradients(by_name), gradients(by_function), strict=True)
        )
    with pytest.raises(RuntimeError, match="can only be called once"):
        by_name._register_builtin_comm_hook(dist.BuiltinCommHookType.FP16_COMPRESS)


@pytest.mark.parametrize("is_late", [False, True])
@BACKENDS
def test_a_programs_hook_takes_the_place_of_ours_once(on_ranks, backend, is_late):
    on_ranks(backend, 3, use_hooks, is_late)


def compress(hook):
    """Train with one of torch's hooks on our class and on torch's."""
    digests = []
    for cls in ("ours", "torch"):
        torch.manual_seed(0)
        layers = nn.Flatten(), nn.Linear(3 * 7 * 7, 101), nn.ReLU(), nn.Linear(101, 7)
        ddp = CLASSES[cls]()(nn.Sequential(*layers), bucket_cap_mb=0.01)
        if hook == "PowerSGD":
            state = PowerSGDState(None, matrix_approximation_rank=2, start_powerSGD_iter=2)
            ddp.register_comm_hook(state, powerSGD_hook)
        else:
            ddp.register_comm_hook(None, fp16_compress_hook)
        digests.append(digest(ddp, train(ddp, 4)))
    return digests


@pytest.mark.parametrize("hook", ["float16", "PowerSGD"])
@pytest.mark.parametrize("world_size", [2, pytest.param(3, marks=pytest.mark.long)])
@BACKENDS
def test_torchs_hooks_that_send_less_do_what_they_do_on_torchs_class(
    on_ranks, backend, world_size, hook
):
    of_ranks = on_ranks(backend, world_size, compress, hook)
    assert len({digest for both in of_ranks for digest in both}) == 1


def accumulate():
    apart, together = made(gradient_as_bucket_view=True), made()
    digests = []
    for ddp in (apart, together):
        for start in (0, 3):
            with ddp.no_sync():
                gradients(ddp, start)
                mine = gradients(ddp, start + 1)
            digests.append([g.sum().item() for g in gradients(ddp, start + 2)])
            assert not equal(mine, [p.grad for p in ddp.parameters()])
            ddp.zero_grad()
    return digests[:2] == digests[2:], digests


@BACKENDS
def test_gradients_are_accumulated_without_exchange_and_then_exchanged(on_ranks, backend):
    first, *others = on_ranks(backend, 3, accumulate)
    assert first[0]
    assert all(other == first for other in others)


def join_unevenly(cls, by_initial, **options):
    ddp = made(cls, **options)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    with ddp.join(divide_by_initial_world_size=by_initial):
        for step in range(2 + dist.get_rank()):
            optimizer.zero_grad()
            gradients(ddp, step)
            optimizer.step()
    return digest(ddp, optimizer)


@pytest.mark.parametrize("by_initial", [True, False])
def test_uneven_inputs_give_torchs_bits_of_our_backend_everywhere(on_ranks, by_initial):
    expected = set(on_ranks("unisono", 3, join_unevenly, "torch", by_initial))
    assert len(expected) == 1
    options = {"gradient_as_bucket_view": True, "bucket_cap_mb": 0.01}
    for backend in ("unisono", "gloo"):
        for given in ({}, options):
            assert set(on_ranks(backend, 3, join_with, by_initial, given)) == expected


def join_with(by_initial, options):
    return join_unevenly("ours", by_initial, **options)


def pickle_and_copy():
    ddp = made(bucket_cap_mb=0.05)
    train(ddp, 2)
    file = io.BytesIO()
    torch.save(ddp, file)
    file.seek(0)
    again, copied = torch.load(file, weights_only=False), copy.deepcopy(ddp)
    assert type(again) is type(copied) is unisono.distributed.DistributedDataParallel
    assert digest(ddp, train(ddp, 2)) == digest(again, train(again, 2))
    assert digest(ddp, train(ddp, 1)) != digest(copied, train(copied, 2))
    again.register_comm_hook([], nothing_but_mine)  # the new one's first


@BACKENDS
def test_it_can_be_pickled_and_copied_and_keeps_the_order(on_ranks, backend):
    on_ranks(backend, 3, pickle_and_copy)


def train_in_a_part():
    members = [3, 1, 0]  # the group sorts them
    group = dist.new_group(members)
    if dist.get_rank() in members:
        ddp = made(process_group=group, bucket_cap_mb=0.01)
        return digest_of_parameters(ddp, train(ddp, 3))
    with pytest.raises(ValueError, match="on its members only"):
        made(process_group=group)
    return None


def digest_of_parameters(ddp, _):
    return [parameter.sum().item() for parameter in ddp.parameters()]


def test_it_works_in_a_part_of_the_world(on_ranks):
    ours, gloo = (on_ranks(backend, 4, train_in_a_part) for backend in ("unisono", "gloo"))
    assert ours == gloo
    assert ours[0] == ours[1] == ours[3]
    assert ours[2] is None


class Words(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(50, 3, sparse=True)
        self.out = nn.Linear(3, 2)

    def forward(self, x):
        return self.out(self.words(x).mean(1))


def look_up_words():
    rank = dist.get_rank()
    torch.manual_seed(0)
    ddp = unisono.distributed.DistributedDataParallel(Words(), bucket_cap_mb=0.00001)

    def given(r):
        # repeated words, words that all have, and none at all on rank 2
        return torch.tensor([[1, 1, 7], [r, 40 + r, 7]])[: 2 if r != 2 else 0]

    ddp(given(rank)).sum().backward()
    found = ddp.module.words.weight.grad
    everybodys = []
    for r in range(3):
        local = copy.deepcopy(ddp.module)
        local.zero_grad()
        local(given(r)).sum().backward()
        everybodys.append(local.words.weight.grad.to_dense() * (1 / 3))
    assert found.is_sparse
    return torch.equal(found.to_dense(), tree_sum(everybodys, torch.add))


@BACKENDS
def test_sparse_gradients_are_added_in_order_too(on_ranks, backend):
    assert on_ranks(backend, 3, look_up_words) == [True] * 3


def use_parts(cls):
    class Parts(nn.Module):
        def __init__(self):
            super().__init__()
            self.parts = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))
            self.all = nn.Linear(4, 4)

    torch.manual_seed(0)
    model = Parts()
    model.forward = lambda x, which: model.all(model.parts[which](x))
    options = {"find_unused_parameters": True, "bucket_cap_mb": 0.00001}
    ddp = made.__globals__["CLASSES"][cls]()(model, **options)
    rank = dist.get_rank()
    ddp(torch.ones(2, 4) * (rank + 1), rank).sum().backward()
    assert ddp.module.parts[3].weight.grad is None  # which nobody has used
    return [p.grad.tolist() for p in ddp.parameters() if p.grad is not None]


def test_parameters_that_some_ranks_do_not_use(on_ranks):
    expected = on_ranks("unisono", 3, use_parts, "torch")
    assert on_ranks("unisono", 3, use_parts, "ours") == expected
    assert on_ranks("gloo", 3, use_parts, "ours") == expected


def delay_some():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 3))
    late = [("1.weight", model[1].weight), ("1.bias", model[1].bias)]  # known first
    ddp = unisono.distributed.DistributedDataParallel(
        model, delay_all_reduce_named_params=late, param_to_hook_all_reduce=model[0].weight
    )
    ddp(torch.ones(2, 4) * (dist.get_rank() + 1)).sum().backward()
    return [parameter.grad.tolist() for parameter in model.parameters()]


def test_parameters_whose_exchange_is_delayed(on_ranks):
    ours, gloo = (on_ranks(backend, 3, delay_some) for backend in ("unisono", "gloo"))
    assert ours == gloo
    assert ours[0] == ours[1] == ours[2]


def fail_and_go_on():
    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            raise ArithmeticError("in the backward pass")

    ddp = made(bucket_cap_mb=0.01)
    train(ddp, 2)
    x, y = data(0)
    with pytest.raises(ArithmeticError):
        nn.functional.cross_entropy(ddp(Fails.apply(x.requires_grad_())), y).backward()
    again = made(bucket_cap_mb=0.01)
    reference = weakref.ref(ddp)
    del ddp
    gc.collect()
    assert reference() is None
    return digest(again, train(again, 2))


@BACKENDS
def test_after_an_exception_a_model_can_be_dropped_and_another_trained(on_ranks, backend):
    assert len(set(on_ranks(backend, 3, fail_and_go_on))) == 1


def part_company(other_call):
    ddp = made()
    train(ddp, 2)
    with pytest.raises(MismatchError) as caught:
        if dist.get_rank() == 1:
            CALLS[other_call]()
        else:
            train(ddp, 1)
    dist.barrier()  # the group lives on
    return str(caught.value)


CALLS = {
    "barrier": lambda: dist.barrier(),
    "all_reduce(SUM) of 9 int64": lambda: dist.all_reduce(torch.ones(9, dtype=torch.int64)),
    "broadcast of 3 float32 elements with root 2": lambda: dist.broadcast(torch.ones(3), 2),
}


@pytest.mark.parametrize("call", CALLS)
def test_a_rank_that_does_something_else_than_train_is_named_on_all(on_ranks, call):
    for rank, message in enumerate(on_ranks("unisono", 3, part_company, call)):
        assert call in message
        assert "rank 1" in message
        assert re.search(
            r"(broadcast|all_reduce\(SUM\)) of [\d,]+ (float32|int64|uint8)", message
        ), rank
