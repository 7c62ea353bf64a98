"""Who gets which exchange, and what is refused with a way out."""

from types import SimpleNamespace

import pytest
import torch
from tests.workers.desk import Job
from tests.workers.test_barrier import control_of  # noqa: F401
from torch import distributed, nn

import unisono
from unisono.engine.exchange.choice import EXCHANGE_VARIABLE, check_devices, name_of_exchange

CPU = SimpleNamespace(is_host=True, name="cpu")
GPU = SimpleNamespace(is_host=False, is_divided=False, name="cuda:0")
GPUS = SimpleNamespace(is_host=False, is_divided=True, name="cuda:0, cuda:1")


@pytest.fixture(autouse=True)
def nothing_is_set(monkeypatch):
    monkeypatch.delenv(EXCHANGE_VARIABLE, raising=False)


@pytest.mark.parametrize(
    ("asked", "set_to", "device", "name"),
    [
        ("auto", None, CPU, "shared"),
        ("auto", None, GPU, "staged"),
        ("auto", "auto", GPU, "staged"),
        ("auto", None, GPUS, "staged"),
        ("auto", "staged", CPU, "staged"),
        ("auto", "gloo", CPU, "gloo"),
        ("auto", "nccl", GPU, "nccl"),
        ("shared", "staged", CPU, "shared"),  # the argument beats the environment
        ("shared", "pigeons", CPU, "shared"),
        ("staged", None, CPU, "staged"),
        ("staged", None, GPU, "staged"),
        ("gloo", None, CPU, "gloo"),
        ("nccl", None, GPU, "nccl"),
    ],
)
def test_the_name_of_an_exchange(monkeypatch, asked, set_to, device, name):
    monkeypatch.setattr(distributed, "is_nccl_available", lambda: True)
    if set_to is not None:
        monkeypatch.setenv(EXCHANGE_VARIABLE, set_to)
    assert name_of_exchange(asked, device) == name


@pytest.mark.parametrize(
    ("asked", "set_to", "device", "has_nccl", "words"),
    [
        ("nccl", None, CPU, True, 'GPU for each worker.*pass `exchange="gloo"`'),
        ("auto", "nccl", CPU, True, "UNISONO_EXCHANGE=nccl .* this one computes on the CPU"),
        ("nccl", None, GPU, False, 'built with NCCL.*pass `exchange="staged"`'),
        ("nccl", None, GPUS, True, "one GPU for each .* a split model on cuda:0, cuda:1: leave"),
        ("shared", None, GPU, True, '`exchange="shared"` .* on cuda:0: leave it out, or pass'),
        ("auto", "shared", GPU, True, "UNISONO_EXCHANGE=shared must have"),
        ("gloo", None, GPU, True, "host's memory.*computes on cuda:0"),
        ("auto", "pigeons", CPU, True, "UNISONO_EXCHANGE must be one of .* but is 'pigeons'"),
    ],
)
def test_what_cannot_be_is_refused(monkeypatch, asked, set_to, device, has_nccl, words):
    monkeypatch.setattr(distributed, "is_nccl_available", lambda: has_nccl)
    if set_to is not None:
        monkeypatch.setenv(EXCHANGE_VARIABLE, set_to)
    with pytest.raises(ValueError, match=words):
        name_of_exchange(asked, device)


@pytest.mark.parametrize(
    ("asked", "device", "replicas_for", "name"),
    [
        ("auto", CPU, "", "hosts"),
        ("shared", CPU, "", "hosts"),
        ("staged", CPU, "", "staged hosts"),
        ("auto", CPU, "closure", "staged hosts"),
        ("auto", GPU, "", "staged hosts"),
        ("auto", GPUS, "on_gradients", "staged hosts"),
    ],
)
def test_the_name_of_an_exchange_on_several_hosts(asked, device, replicas_for, name):
    assert name_of_exchange(asked, device, replicas_for=replicas_for, num_hosts=2) == name


@pytest.mark.parametrize(
    ("asked", "device", "words"),
    [
        ("gloo", CPU, '`exchange="gloo"` is for workers of one host.*pass `exchange="staged"`'),
        ("nccl", GPU, '`exchange="nccl"` is for workers of one host.*pass `exchange="staged"`'),
        ("shared", GPU, '`exchange="shared"` .* on cuda:0: leave it out, or pass'),
    ],
)
def test_what_cannot_be_on_several_hosts_is_refused(asked, device, words):
    with pytest.raises(ValueError, match=words):
        name_of_exchange(asked, device, num_hosts=2)


@pytest.mark.parametrize("exchange", ["pigeons", "", None, "group"])
def test_what_is_no_exchange_is_refused_when_a_run_is_made(exchange):
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ValueError, match="`exchange` must be one of"):
        unisono.Run(model, optimizer, exchange=exchange)
    with pytest.raises(ValueError, match="`exchange` must be one of"):
        unisono.Trainer(model, optimizer, lambda model, batch: None, exchange=exchange)


def test_nccl_without_a_gpu_is_refused_when_a_run_is_made():
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ValueError, match="must have a GPU for each worker"):
        unisono.Run(model, optimizer, exchange="nccl", device="cpu")


@pytest.mark.parametrize(
    ("identities", "words"),
    [
        (["a", "b", "c"], None),
        (["a", "b", "a"], "ranks 0 and 2 share one"),
        (["b", "a", "a"], "ranks 1 and 2 share one"),
    ],
)
def test_two_workers_on_one_gpu_are_refused_on_all(control_of, identities, words):  # noqa: F811
    def work(team):
        device = SimpleNamespace(identity=identities[team.world.rank])
        check_devices("staged", device, team)
        check_devices("nccl", device, team)
        return "fine"

    for result in Job(control_of(3)).run(work).values():
        if words is None:
            assert result == "fine"
        else:
            assert isinstance(result, ValueError)
            assert words in str(result)
            assert "--workers-per-gpu 1" in str(result)


def loop_on(exchange):
    run_with = exchange if isinstance(exchange, str) else exchange[unisono.world().rank]
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run = unisono.Run(model, optimizer, shards=2, exchange=run_with)
    data = torch.utils.data.TensorDataset(torch.randn(4, 2))
    name = None
    for step in run.steps(data, batch_size=2, epochs=1):
        with step:
            for (inputs,) in step.shards:
                step.backward(model(inputs).mean())
        name = type(run.context.engine.exchange).__name__
    return name


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_run_computes_on_the_exchange_that_it_or_the_environment_names(monkeypatch, workers):
    for exchange, set_to, name in (
        ("auto", None, "SharedExchange"),
        ("auto", "gloo", "GroupExchange"),
        ("auto", "staged", "StagedExchange"),
        ("gloo", "staged", "GroupExchange"),
    ):
        if set_to is not None:
            monkeypatch.setenv(EXCHANGE_VARIABLE, set_to)
        assert unisono.launch(loop_on, exchange, workers=workers) == [name] * workers


@pytest.mark.slow
def test_workers_that_name_different_exchanges_are_told_so():
    with pytest.raises(
        unisono.errors.MismatchError, match="`exchange` must be the same on every worker"
    ):
        unisono.launch(loop_on, ["gloo", "staged"], workers=2)
