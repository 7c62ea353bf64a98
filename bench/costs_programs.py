"""The programs of ``bench.costs``: each does one thing and prints what it took.

A line ``cost NAME NUMBER`` is a figure that only the program can take; memory is measured from
outside. ``costs_programs.py WHAT SIDE FOLDER``, by itself or below ``unisono run`` or ``torchrun``.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

import unisono

GIGABYTE_ROWS, ROW = 1 << 20, 256  # 2²⁰ rows of 256 floats are 2³⁰ bytes
SAMPLES = 200_000  # of an evaluation
EVENTS = 200_000  # steps in an event file


def cost(name: str, number: float) -> None:
    """Say one figure, once of all workers."""
    if unisono.world().rank == 0:
        print("cost", name, number, flush=True)


def gigabyte() -> TensorDataset:
    return TensorDataset(torch.ones(GIGABYTE_ROWS, ROW))


def touch(data: TensorDataset) -> None:
    """Read all of it, as an epoch does."""
    total = sum(float(block.sum()) for block in data.tensors[0].split(1 << 14))
    assert total == GIGABYTE_ROWS * ROW


def launched(side: str, folder: Path) -> None:
    """Hand a gigabyte to workers, or let them make it."""
    if side == "unisono":
        unisono.launch(touch, gigabyte(), workers=2)
    else:
        unisono.launch(made, workers=2)


def made() -> None:
    touch(gigabyte())


def shared(side: str, folder: Path) -> None:
    touch(unisono.share(gigabyte))


def large() -> tuple[nn.Module, torch.optim.Optimizer]:
    """84.5 million parameters: with Adam's state, a gigabyte."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(1300, 1300) for _ in range(50)))
    return model, torch.optim.Adam(model.parameters(), lr=1e-4, fused=True)


def large_state(side: str, folder: Path) -> None:
    """Train two steps, or two more, with a checkpoint at the end."""
    model, optimizer = large()
    inputs = torch.ones(64, 1300)
    path = folder / "plain.pt"
    start_s = end_s = time.perf_counter()
    if side == "plain":
        if path.exists():
            state = torch.load(path)
            model.load_state_dict(state["model"])
            optimizer.load_state_dict(state["optimizer"])
            cost("loaded_s", time.perf_counter() - start_s)
        for _ in range(2):
            optimizer.zero_grad()
            model(inputs[:2]).mean().backward()
            optimizer.step()
        end_s = time.perf_counter()
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, path)
        os.sync()
        cost("end_s", time.perf_counter() - end_s)
        return
    steps = 4 if (folder / "run" / "checkpoints").exists() else 2
    run = unisono.Run(
        model, optimizer, shards=2, seed=0, directory=folder / "run", checkpoint="1000 epochs"
    )
    for step in run.steps(TensorDataset(inputs), batch_size=2, steps=steps):
        if start_s:
            cost("loaded_s", time.perf_counter() - start_s)
            start_s = 0.0
        with step:
            for (batch,) in step.shards:
                step.backward(model(batch).mean())
        end_s = time.perf_counter()
    cost("end_s", time.perf_counter() - end_s)


class Numbers(Dataset[Tensor]):
    """Samples that take no memory."""

    def __init__(self, size: int) -> None:
        self._size = size

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index: int) -> Tensor:
        return torch.tensor([float(index)])


def few_samples(side: str, folder: Path) -> None:
    many_samples(side, folder, 10**4)


def many_samples(side: str, folder: Path, size: int = 10**8) -> None:
    """Time the first step of a long data set, with or without loader processes."""
    model = nn.Linear(1, 1)
    run = unisono.Run(model, torch.optim.SGD(model.parameters(), lr=1e-9), shards=2, seed=0)
    num_loaders = 2 if side == "loaders" else 0
    data = DataLoader(Numbers(size), batch_size=64, shuffle=True, num_workers=num_loaders)
    start_s = time.perf_counter()
    for step in run.steps(data, steps=1):
        with step:
            for batch in step.shards:
                step.backward(model(batch).mean())
    cost("first_step_s", time.perf_counter() - start_s)


def classifier() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 10))


def images() -> TensorDataset:
    return TensorDataset(torch.randn(SAMPLES, 32), torch.randint(10, (SAMPLES,)))


def mean_loss(model: nn.Module, batch: list[Tensor]) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def sweeps(side: str, folder: Path) -> None:
    """Evaluate and predict; samples a second of processor time, in thousands, the second time."""
    torch.set_num_threads(1)
    data, model = images(), classifier()
    if side == "plain":
        ways = {
            "evaluate": lambda: plain_evaluate(model, data),
            "predict": lambda: plain_predict(model, data),
        }
    else:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        trainer = unisono.Trainer(model, optimizer, mean_loss, shards=int(side), seed=0)
        ways = {
            "evaluate": lambda: trainer.evaluate(data, batch_size=64),
            "predict": lambda: trainer.predict(data, batch_size=64),
        }
    for name, way in ways.items():
        way()
        start_s = time.process_time()
        way()
        cost(f"{name}_k", SAMPLES / 1000 / (time.process_time() - start_s))


@torch.no_grad()
def plain_evaluate(model: nn.Module, data: Dataset[Any]) -> float:
    model.eval()
    total = 0.0
    for inputs, labels in DataLoader(data, batch_size=64):
        total += F.cross_entropy(model(inputs), labels).item() * len(inputs)
    return total / SAMPLES


@torch.no_grad()
def plain_predict(model: nn.Module, data: Dataset[Any]) -> Tensor:
    model.eval()
    return torch.cat([model(inputs) for inputs, _ in DataLoader(data, batch_size=64)])


def shard(side: str, folder: Path) -> None:
    """Time what a shard of a tiny model costs beside its passes, in ms."""
    torch.set_num_threads(1)
    batch = [torch.randn(8, 32), torch.randint(10, (8,))]
    model = classifier()
    passes_s = best(lambda: (model.zero_grad(), mean_loss(model, batch).backward()), 400)
    steps_s = {}
    for shards in (2, 18):
        model = classifier()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        run = unisono.Run(model, optimizer, shards=shards, seed=0)
        data = TensorDataset(torch.randn(8 * shards, 32), torch.randint(10, (8 * shards,)))
        times_s, start_s = [], time.perf_counter()
        for step in run.steps(data, batch_size=8 * shards, steps=400):
            with step:
                for one in step.shards:
                    step.backward(mean_loss(model, one))
            now_s = time.perf_counter()
            times_s.append(now_s - start_s)
            start_s = now_s
        steps_s[shards] = sorted(times_s)[len(times_s) // 2]
    cost("shard_ms", 1000 * ((steps_s[18] - steps_s[2]) / 16 - passes_s))


LOOP_WIDTHS = {"small": (64, 128, 32), "large": (256, 1024, 512)}  # 12,448 and 787,968 parameters
NUM_LOOPS, LOOP_STEPS, LOOP_BATCH = 60, 5, 64


def loops(side: str, folder: Path) -> None:
    """Train in many short loops, and in one of as many steps; `side` is a net, and `fit` or not."""
    name, _, way = side.partition(" ")
    before, inner, after = LOOP_WIDTHS[name]
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(before, inner), nn.ReLU(), nn.Linear(inner, after))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    rows = LOOP_BATCH * LOOP_STEPS
    data = TensorDataset(torch.randn(rows, before), torch.randn(rows, after))
    if way:
        trainer = unisono.Trainer(model, optimizer, squares, shards=2)
    else:
        run = unisono.Run(model, optimizer, shards=2)

    def train(steps: int) -> None:
        if way:
            trainer.fit(data, batch_size=LOOP_BATCH, steps=steps)
            return
        for step in run.steps(data, batch_size=LOOP_BATCH, steps=steps):
            with step:
                for inputs, targets in step.shards:
                    step.backward(F.mse_loss(model(inputs), targets))

    done, times_s = 0, dict[int, list[float]]({1: [], NUM_LOOPS: []})
    for num_loops in [1, *[1, NUM_LOOPS] * 3]:
        start_s = time.perf_counter()
        for _ in range(num_loops):
            done += LOOP_STEPS * NUM_LOOPS // num_loops
            train(done)
        times_s[num_loops].append(time.perf_counter() - start_s)
    if unisono.world().rank == 0:
        more_s = min(times_s[NUM_LOOPS]) - min(times_s[1])
        cost("loop_ms", more_s / NUM_LOOPS * 1e3)


def squares(model: nn.Module, batch: list[Tensor]) -> Tensor:
    inputs, targets = batch
    return F.mse_loss(model(inputs), targets)


def best(action: Any, times: int) -> float:
    """Give the middle of so many times, in seconds."""
    seen = []
    for _ in range(times):
        start_s = time.perf_counter()
        action()
        seen.append(time.perf_counter() - start_s)
    return sorted(seen)[times // 2]


def events(side: str, folder: Path) -> None:
    """Read the event file of a long run: that of a short one, its steps repeated."""
    from unisono.tools.report.history import gather

    model = classifier()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trainer = unisono.Trainer(
        model, optimizer, mean_loss, shards=2, seed=0, directory=folder / "run"
    )
    data = TensorDataset(torch.randn(64, 32), torch.randint(10, (64,)))
    trainer.fit(data, batch_size=64, steps=3)
    path = folder / "run" / "events.jsonl"
    before, last, after = split_at_last_step(path.read_text().splitlines(keepends=True))
    with path.open("w") as file:
        file.writelines(before)
        file.writelines(
            last.replace('"step":3', f'"step":{3 + number}') for number in range(EVENTS)
        )
        file.writelines(after)
    start_s = time.process_time()
    history = gather(folder / "run")
    cost("events_s", time.process_time() - start_s)
    assert history.progress.ended is not None


def split_at_last_step(lines: list[str]) -> tuple[list[str], str, list[str]]:
    at = max(number for number, line in enumerate(lines) if '"event":"step"' in line)
    return lines[:at], lines[at], lines[at + 1 :]


def first_step(side: str, folder: Path) -> None:
    """Train one step, by hand on gloo: ``first_step.py`` is the same with Unisono."""
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(64, 16), torch.randint(4, (64,)))
    plain = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
    model = nn.parallel.DistributedDataParallel(plain)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    sampler: Any = torch.utils.data.DistributedSampler(data)
    inputs, targets = next(iter(DataLoader(data, batch_size=8, sampler=sampler)))
    F.cross_entropy(model(inputs), targets).backward()
    optimizer.step()
    print("first step done at", time.time(), flush=True)
    dist.destroy_process_group()


PROGRAMS = {
    one.__name__: one
    for one in (
        *(launched, shared, large_state, many_samples, few_samples),
        *(sweeps, shard, loops, events, first_step),
    )
}

if __name__ == "__main__":
    PROGRAMS[sys.argv[1]](sys.argv[2], Path(sys.argv[3]))
