"""Event files made up: the same ones each time, with a slow worker, a recovery and a failure."""

import json
import math
import random
from pathlib import Path

BEGAN_UNIX_S = 1_790_000_000.0
PHASES = ("loading", "forward", "backward", "waiting", "summing", "updating")


def to_bytes(line):
    return json.dumps(line, separators=(",", ":")).encode() + b"\n"


def event(kind, step, at_s=1.0, **facts):
    return {"event": kind, "step": step, "time_unix_s": BEGAN_UNIX_S + at_s, **facts}


def start_line(*, num_workers=2, end_step=300, step=0, **change):
    return {
        "event": "start",
        "format": 1,
        "time_unix_s": BEGAN_UNIX_S,
        "step": step,
        "epoch": 0,
        "end_step": end_step,
        "steps_per_epoch": 100,
        "num_samples": 6400,
        "batch_size": 64,
        "shards": 4,
        "seed": 7,
        "world_size": num_workers,
        "ranks": list(range(num_workers)),
        "pids": [4000 + rank for rank in range(num_workers)],
        "host": "example",
        "identity": {
            "seed": 7,
            "shards": 4,
            "batch_size": 64,
            "dataset length": 6400,
            "precision": "float32",
            "threads": 1,
            "torch": "2.13.0",
            "processor": "Example CPU",
        },
        "versions": {"unisono": "0.1.0", "torch": "2.13.0", "python": "3.11.7"},
        "machine": {"processor": "Example CPU", "cores": 4, "system": "Linux"},
        "command": ["unisono", "run", "-n", str(num_workers), "my script.py", "--lr", "0.1"],
        "folder": "/home/somebody/project",
        "num_parameters": 61706,
        "loader_workers": 0,
        **change,
    }


def step_line(step, *, ranks, phases, seconds, time_unix_s=BEGAN_UNIX_S, **change):
    """A step; ``phases`` has one row a rank, one entry a phase."""
    return {
        "event": "step",
        "time_unix_s": time_unix_s,
        "step": step,
        "epoch": step // 100,
        "num_samples": 64,
        "seconds": seconds,
        "means": {"loss": 2.3 * math.exp(-step / 80) + 0.1},
        "learning_rates": [0.1],
        "gradient_norm": None,
        "ranks": ranks,
        **{f"{name}_s": [row[i] for row in phases] for i, name in enumerate(PHASES)},
        **change,
    }


def run_lines(
    *, num_steps=300, num_workers=4, slow=2, lost_at=120, fails=False, ends=True, **header
):
    """A run: worker ``slow`` is slow, worker 1 is lost at ``lost_at`` and replaced."""
    draw = random.Random(1)
    now_s = 0.5  # since the run began
    yield start_line(num_workers=num_workers, end_step=num_steps, **header)
    for step in range(num_steps):
        if step == lost_at:
            others = [rank for rank in range(num_workers) if rank != 1]
            why = ["worker 1 was killed by SIGKILL"]
            yield event("workers", step, now_s, ranks=others, lost=[1], why=why)
            now_s += 0.12
        if step == lost_at + 12:
            why = ["a replacement for worker 1 has come"]
            yield event("workers", step, now_s, ranks=[*range(num_workers)], joined=[1], why=why)
        ranks = [
            rank
            for rank in range(num_workers)
            if not (rank == 1 and lost_at <= step < lost_at + 12)
        ]
        begun = [now_s + draw.uniform(0, 0.0002) for _ in ranks]
        busy = []
        for rank in ranks:
            factor = draw.uniform(0.9, 1.1) * num_workers / len(ranks)
            passes = factor * (1.7 if rank == slow else 1.0)
            busy.append([0.0006 * factor, 0.002 * passes, 0.0041 * passes])
        slowest = max(b + sum(row) for b, row in zip(begun, busy, strict=True))
        phases = [
            [*row, slowest - b - sum(row) + 0.0001, 0.0004, 0.0007]
            for b, row in zip(begun, busy, strict=True)
        ]
        ended_s = slowest + 0.0012
        seconds = ended_s - now_s + (0.12 if step == lost_at else 0)
        now_s = ended_s + 0.0003
        noise = draw.gauss(0, 0.06)
        yield step_line(
            step,
            ranks=ranks,
            phases=phases,
            seconds=seconds,
            begun_s=begun,
            time_unix_s=BEGAN_UNIX_S + ended_s,
            means={
                "loss": 2.2 * math.exp(-step / 90) + 0.12 + noise * math.exp(-step / 200),
                "accuracy": 1 - 0.9 * math.exp(-step / 70) + noise / 6,
            },
            learning_rates=[0.1 * (0.5 + 0.5 * math.cos(math.pi * step / num_steps))],
            gradient_norm=1.5 * math.exp(-step / 200) + abs(noise),
        )
        if step % 100 == 99:
            now_s += 0.05
            loss = 2.2 * math.exp(-step / 90) + 0.16
            means = {"loss": loss, "accuracy": 0.97 - loss / 9}
            yield event("evaluation", step + 1, now_s, epoch=step // 100, seconds=0.05, means=means)
            yield event("checkpoint", step + 1, now_s)
    if fails:
        message = f"the loss of step {num_steps} is nan: lower the learning rate"
        yield event(
            "failure", num_steps, now_s, rank=2, error="NonFiniteLossError", message=message
        )
    elif ends:
        yield event(
            "end",
            num_steps,
            now_s,
            seconds=now_s,
            samples_per_second=num_steps * 64 / now_s,
            digest="0123456789abcdef" * 4,
        )


def write_run(directory, lines=None, **options):
    """Write a run's folder and return it."""
    folder = Path(directory)
    folder.mkdir(parents=True, exist_ok=True)
    lines = run_lines(**options) if lines is None else lines
    (folder / "events.jsonl").write_bytes(b"".join(map(to_bytes, lines)))
    return folder
