"""The step engine on the test accelerator, with ranks as threads that may die: all of a step's way.

Each rank has a device of its own, and all share one accelerator, which knows the order of all that
they do. So a wait that is missing between two workers is found, too: one that reads what another
has not finished, or writes what another still reads.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from tests.accelerator import sim
from tests.exchange.fake_hosts import HostsJob
from tests.workers.fake_launcher import Death, Job
from torch import nn

from unisono.engine.exchange.exchange import Exchange, ExchangeKind
from unisono.engine.exchange.host_memory import HostMemoryCarriage
from unisono.engine.exchange.owned_pieces import OwnedPieces
from unisono.engine.exchange.replicas import Replicas
from unisono.engine.state.contents import digest_of, digest_of_weights, place
from unisono.engine.state.optimizer_state import group_options, take_state
from unisono.engine.step.engine import StepEngine
from unisono.engine.step.transforms import Clipping
from unisono.runtime.device import Device
from unisono.runtime.workers.control_block import ControlBlock
from unisono.runtime.workers.team import Team

LOOKED_AT_FIRST = 2  # steps that look whether passes move parameters of no optimizer
STEPS, SHARDS, SAMPLES = 4, 5, 4  # of a shard
SEED = 7
_ALONE = threading.Lock()


class Model(nn.Module):
    """BatchNorm, dropout, a branch for some shards, a buffer that is replaced, odd parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 70)
        self.norm = nn.BatchNorm1d(70)
        self.rare = nn.Linear(70, 70)
        self.last = nn.Linear(70, 3)
        self.turned = nn.Parameter(torch.randn(3, 6).T)
        self.scale = nn.Parameter(torch.tensor(1.1))
        self.empty = nn.Parameter(torch.empty(0, 2))
        self.fixed = nn.Parameter(torch.randn(3), requires_grad=False)
        self.register_buffer("mean", torch.zeros(3))

    def forward(self, inputs: torch.Tensor, is_rare: bool) -> torch.Tensor:
        hidden = F.dropout(torch.relu(self.norm(self.first(inputs))), 0.2, self.training)
        if is_rare:
            hidden = hidden + self.rare(hidden)
        outputs = self.last(hidden) * self.scale + inputs @ self.turned + self.fixed
        self.mean = 0.9 * self.mean + 0.1 * outputs.detach().mean(0)
        return outputs - self.mean + self.empty.sum()


class Normed(torch.optim.SGD):
    """Looks at whole parameters, and keeps tensors of its own."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None and parameter.numel():
                    state = self.state[parameter]
                    norm = state.get("norm", torch.zeros((), device=parameter.device))
                    state["norm"] = norm + parameter.grad.norm()
                    parameter -= group["lr"] * parameter.grad / (1 + state["norm"])


OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=0.01, foreach=False),
    "normed": lambda parameters: Normed(parameters, lr=0.01),
}


def batch_of(step: int, shard: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 * step + shard)
    inputs = torch.randn(SAMPLES, 6, generator=generator)
    return inputs, inputs[:, :3].argmax(1)


def train(
    team: Team,
    kind: str,
    optimizer: str,
    clip_norm: float | None,
    bad: tuple[int, int] | None,
    is_sharded: bool,
) -> dict[str, Any]:
    """Train on one rank; returns what must be the same on every rank of every world."""
    device = Device(torch.device(kind, team.world.rank) if kind == "sim" else torch.device("cpu"))
    model, updates = _made(optimizer)
    if not team.is_leader:
        _scribble(model)  # when a loop begins, all take the leader's values
    _to(model, updates, device)
    exchange = Exchange(
        ExchangeKind(HostMemoryCarriage, OwnedPieces if is_sharded else Replicas),
        *(model, updates),
        shards=SHARDS,
        team=team,
        device=device,
        new_key=1,
    )
    allowed = {"item"} if clip_norm else set()
    engine = StepEngine(
        model, updates, exchange, seed=SEED, team=team, clipping={"": Clipping(norm=clip_norm)}
    )
    means: list[dict[str, float]] = []
    try:
        _snapshot(engine, team, 0, updates)
        for step in range(STEPS - 1):
            is_watched = team.is_leader and step >= LOOKED_AT_FIRST
            with _no_wait_but(allowed) if is_watched else nullcontext():
                means.append(_take_step(engine, model, device, step, bad))
        # Others take the snapshot while the leader still is in this one.
        means.append(_take_step(engine, model, device, STEPS - 1, bad))
        _snapshot(engine, team, STEPS, updates)
        digest = digest_of_weights(model) if is_sharded else digest_of(model, updates)
        _scribble(model)
        if not is_sharded:
            updates.state.clear()
        exchange.load()  # as a replacement does
        assert digest == (digest_of_weights(model) if is_sharded else digest_of(model, updates))
        assert model.mean.any()
        assert model.norm.running_mean.any()
    except Exception:
        exchange.unbind()
        raise
    exchange.unbind()  # not where a rank dies: a process that is killed does nothing more
    return {"digest": digest_of(model, updates), "means": means}


@contextmanager
def _no_wait_but(allowed: set[str]) -> Iterator[None]:
    """See that nobody waits for a device, but by asking for it; on the CPU nobody does."""
    if "sim" not in dir(torch):
        yield
        return
    with sim.synchronizations() as seen:
        yield
    found = [one for one in seen if one.kind not in allowed and "Moving." not in one.function]
    assert not found, found


@functools.cache
def _weights() -> dict[str, torch.Tensor]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        return Model().state_dict()


def _made(optimizer: str) -> tuple[Model, torch.optim.Optimizer]:
    model = Model()
    model.load_state_dict(_weights())
    return model, OPTIMIZERS[optimizer]([p for p in model.parameters() if p.requires_grad])


def _scribble(model: nn.Module) -> None:
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            tensor.fill_(7)


def _to(model: nn.Module, optimizer: torch.optim.Optimizer, device: Device) -> None:
    if not device.is_host:
        with _ALONE:  # it switches something of torch's
            place(model, optimizer, device)


def _take_step(
    engine: StepEngine,
    model: Model,
    device: Device,
    step: int,
    bad: tuple[int, int] | None,
) -> dict[str, float]:
    engine.begin(step, 0)
    more: Sequence[int] | None = engine.begin_passes()
    while more is not None:
        for shard in more:
            inputs, labels = device.move(batch_of(step, shard))
            engine.start_shard(shard)
            outputs = model(inputs, is_rare=shard in (1, 4) and step != 2)
            loss = F.cross_entropy(outputs, labels)
            if (step, shard) == bad:
                loss = loss * float("nan")
            accuracy = (outputs.argmax(1) == labels).float().mean()
            engine.finish_shard(shard, {"loss": loss, "accuracy": accuracy}, SAMPLES, 1 / SHARDS)
        more = engine.arrive()
    engine.end_passes()
    means, is_done = engine.finish()
    assert is_done
    return means


def _snapshot(engine: StepEngine, team: Team, step: int, optimizer: torch.optim.Optimizer) -> None:
    def describe() -> Any:
        exchange = engine.exchange
        tensors, numbers = take_state(optimizer, exchange.named_whole())
        return {"step": step, "numbers": numbers, "groups": group_options(optimizer)}, tensors

    assert engine.between.take_snapshot(step, describe, wait=True) is not None


def run(
    control: ControlBlock,
    *deaths: Death,
    kind: str = "sim",
    optimizer: str = "adam",
    clip_norm: float | None = None,
    bad: tuple[int, int] | None = None,
    hosts: Sequence[Sequence[int]] = (),
    is_sharded: bool = False,
) -> dict[int, Any]:
    """Train with one thread a rank; returns what each rank that lived returned or raised.

    Args:
        control: of a job of so many workers.
        deaths: who dies where.
        kind: of device.
        optimizer: one of ``OPTIMIZERS``.
        clip_norm: as of a run.
        bad: a step and a shard whose loss is not a number.
        hosts: the ranks of each, where there are several.
        is_sharded: whether each worker has the optimizer state of its pieces alone.
    """
    if kind == "sim":
        sim.install()
        # torch's engine must not be started by several threads at once.
        torch.ones(1, device="sim", requires_grad=True).sum().backward()
    _weights()
    job = HostsJob(control, deaths, hosts) if hosts else Job(control, deaths)

    def work(team: Team) -> dict[str, Any]:
        try:
            return train(team, kind, optimizer, clip_norm, bad, is_sharded)
        except Exception:
            job.launcher.lose(team.world.rank)  # nobody waits for it
            raise

    return job.run(work)
