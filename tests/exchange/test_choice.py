"""Who gets which exchange, and what is refused with a way out."""

import os
from types import SimpleNamespace

import pytest
import torch
from tests.promises import promise
from tests.workers.fake_launcher import Job
from torch import distributed, nn

import unisono
from unisono.engine.exchange.choice import (
    EXCHANGE_VARIABLE,
    check_devices,
    chosen,
    name_of_exchange,
)
from unisono.engine.exchange.exchange import ExchangeKind
from unisono.engine.exchange.group_carriage import GroupCarriage
from unisono.engine.exchange.host_memory import HostMemoryCarriage
from unisono.engine.exchange.owned_pieces import OwnedPieces
from unisono.engine.exchange.replicas import Replicas
from unisono.engine.exchange.shared_copy import SharedCopy

CPU = SimpleNamespace(is_host=True, name="cpu")
GPU = SimpleNamespace(is_host=False, is_divided=False, name="cuda:0")
GPUS = SimpleNamespace(is_host=False, is_divided=True, name="cuda:0, cuda:1")


@pytest.fixture(autouse=True)
def nothing_is_set(monkeypatch):
    monkeypatch.delenv(EXCHANGE_VARIABLE, raising=False)


@pytest.mark.parametrize(
    ("set_to", "device", "name"),
    [
        (None, CPU, "auto"),
        (None, GPU, "staged"),
        (None, GPUS, "staged"),
        ("shared", CPU, "shared"),
        ("staged", CPU, "staged"),
        ("staged", GPU, "staged"),
        ("gloo", CPU, "gloo"),
        ("nccl", GPU, "nccl"),
        ("zero", GPUS, "zero"),
    ],
)
def test_the_name_of_an_exchange(monkeypatch, set_to, device, name):
    monkeypatch.setattr(distributed, "is_nccl_available", lambda: True)
    if set_to is not None:
        monkeypatch.setenv(EXCHANGE_VARIABLE, set_to)
    assert name_of_exchange(device) == name


@pytest.mark.parametrize(
    ("set_to", "device", "has_nccl", "words"),
    [
        ("nccl", CPU, True, "GPU for each worker.* on the CPU.* or set UNISONO_EXCHANGE=gloo"),
        ("nccl", GPU, False, "built with NCCL.* or set UNISONO_EXCHANGE=staged"),
        ("nccl", GPUS, True, "one GPU for each .* a split model on cuda:0, cuda:1: leave"),
        ("shared", GPU, True, "UNISONO_EXCHANGE=shared must have .* on cuda:0: leave it out"),
        ("gloo", GPU, True, "host's memory.*computes on cuda:0"),
        ("pigeons", CPU, True, "UNISONO_EXCHANGE must be one of .* but is 'pigeons'"),
    ],
)
def test_what_cannot_be_is_refused(monkeypatch, set_to, device, has_nccl, words):
    monkeypatch.setattr(distributed, "is_nccl_available", lambda: has_nccl)
    monkeypatch.setenv(EXCHANGE_VARIABLE, set_to)
    with pytest.raises(ValueError, match=words):
        name_of_exchange(device)


@pytest.mark.parametrize(
    ("set_to", "device", "replicas_for", "part"),
    [
        ("auto", CPU, "", SharedCopy),
        ("shared", CPU, "", SharedCopy),
        ("staged", CPU, "", Replicas),
        ("auto", CPU, "a closure", Replicas),
        ("auto", GPU, "", Replicas),
        ("auto", GPUS, "`on_gradients`", Replicas),
        ("gloo", CPU, "", GroupCarriage),
        ("nccl", GPU, "a closure", GroupCarriage),
        ("zero", GPU, "", OwnedPieces),
    ],
)
def test_the_kind_of_an_exchange(monkeypatch, set_to, device, replicas_for, part):
    monkeypatch.setattr(distributed, "is_nccl_available", lambda: True)
    monkeypatch.setenv(EXCHANGE_VARIABLE, set_to)
    found = name_of_exchange(device, replicas_for=replicas_for)
    sgd = torch.optim.SGD(nn.Linear(2, 1).parameters(), lr=0.1)
    assert part in chosen(found, sgd)


@pytest.mark.parametrize(
    ("set_to", "kind", "ownership"),
    [
        ("auto", torch.optim.SGD, SharedCopy),
        ("auto", torch.optim.Adafactor, Replicas),
        ("shared", torch.optim.Adafactor, SharedCopy),
        ("zero", torch.optim.Adafactor, Replicas),
    ],
)
def test_workers_have_replicas_for_an_optimizer_of_whole_parameters(
    monkeypatch, set_to, kind, ownership
):
    monkeypatch.setenv(EXCHANGE_VARIABLE, set_to)
    optimizer = kind(nn.Linear(2, 1).parameters(), lr=0.1)
    assert chosen(name_of_exchange(CPU), optimizer).ownership is ownership


def test_what_cannot_be_is_refused_when_a_run_is_made(monkeypatch):
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for name, words in (("nccl", "must have a GPU for each worker"), ("group", "must be one of")):
        monkeypatch.setenv(EXCHANGE_VARIABLE, name)
        with pytest.raises(ValueError, match=words):
            unisono.Run(model, optimizer, device="cpu")


@pytest.mark.parametrize(
    ("identities", "words"),
    [
        (["a", "b", "c"], None),
        (["a", "b", "a"], "ranks 0 and 2 share one"),
        (["b", "a", "a"], "ranks 1 and 2 share one"),
    ],
)
def test_two_workers_on_one_gpu_are_refused_on_all(control_of, identities, words):
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


def loop_on(exchanges, make=torch.optim.SGD):
    if exchanges is not None:
        os.environ[EXCHANGE_VARIABLE] = exchanges[unisono.world().rank]
    model = nn.Linear(2, 1)
    optimizer = make(model.parameters(), lr=0.1)
    run = unisono.Run(model, optimizer, shards=2)
    data = torch.utils.data.TensorDataset(torch.randn(4, 2))
    kind = None
    for step in run.steps(data, batch_size=2, epochs=1):
        with step:
            for (inputs,) in step.shards:
                step.backward(model(inputs).mean())
        kind = run._context.engine.exchange.kind
    return kind


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 2])
def test_a_run_computes_on_the_exchange_that_the_environment_names(monkeypatch, workers):
    for set_to, kind in (
        (None, ExchangeKind(HostMemoryCarriage, SharedCopy)),
        ("gloo", ExchangeKind(GroupCarriage, Replicas)),
        ("staged", ExchangeKind(HostMemoryCarriage, Replicas)),
        ("zero", ExchangeKind(HostMemoryCarriage, OwnedPieces)),
    ):
        if set_to is not None:
            monkeypatch.setenv(EXCHANGE_VARIABLE, set_to)
        assert unisono.launch(loop_on, None, workers=workers) == [kind] * workers


def test_who_asks_for_pieces_of_a_whole_update_is_told_that_the_state_is_whole(monkeypatch, capfd):
    monkeypatch.setenv(EXCHANGE_VARIABLE, "zero")
    assert loop_on(None, torch.optim.Adafactor).ownership is Replicas
    said = capfd.readouterr()
    assert "the whole optimizer state, despite UNISONO_EXCHANGE=zero: Adafactor needs" in (
        said.out + said.err
    )


@pytest.mark.slow
def test_workers_with_different_exchanges_are_told_so():
    with pytest.raises(
        unisono.errors.MismatchError, match="UNISONO_EXCHANGE must be the same on every worker"
    ):
        unisono.launch(loop_on, ["gloo", "staged"], workers=2)


class Unknown(torch.optim.SGD):
    """Is not one of torch's own, and notes its steps in a file of its worker."""

    def step(self, closure=None):
        with open(f"{self.param_groups[0]['folder']}/{unisono.world().rank}", "a") as file:
            file.write(".")
        return super().step(closure)


def steps_of_each(folder):
    def make(parameters, lr):
        return Unknown([{"params": list(parameters), "folder": str(folder)}], lr)

    return loop_on(None, make)


@promise("conditions.7")
@pytest.mark.slow
@pytest.mark.parametrize(("set_to", "updating"), [("auto", ["0", "1"]), ("shared", ["0"])])
def test_an_optimizer_that_is_not_known_updates_whole_parameters(
    monkeypatch, tmp_path, set_to, updating
):
    monkeypatch.setenv(EXCHANGE_VARIABLE, set_to)
    unisono.launch(steps_of_each, tmp_path, workers=2)
    assert {one.name: one.read_text() for one in tmp_path.iterdir()} == dict.fromkeys(
        updating, ".."
    )
